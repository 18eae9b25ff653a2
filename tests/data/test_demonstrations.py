"""Demonstrations: looked up by row id, by prompt or in a column, and tokenised as a rollout would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config.data import Data
from burnish.config.errors import UserError
from burnish.data.demonstrations import PromptDemonstrations, demonstrations_by_prompt, prompt_key
from burnish.data.prompt_stream import PromptStream
from burnish.models.tokenizer import Tokenizer

ROWS = [{"prompt": f"{k}>", "answer": str(k), "shown": f"{k}{k}" if k % 2 else None} for k in range(11, 17)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters("0123456789>")


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def traces_of(
    folder: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]] | None = None, longest: int = 8, **keys: Any
) -> tuple[PromptDemonstrations, PromptStream]:
    data: dict[str, Any] = {"train": {"path": written(folder / "rows.jsonl", ROWS)}, **keys}
    if rows is not None:
        data["demonstrations"] = {"path": written(folder / "shown.jsonl", rows)}
    config = Data.model_validate(data)
    stream = PromptStream(config.train, tokenizer, config, 0)
    traces = PromptDemonstrations(config, tokenizer, longest, 0, None)
    return traces, stream


def texts(traces: PromptDemonstrations, stream: PromptStream, tokenizer: Tokenizer) -> dict[str, list[str]]:
    return {
        row.id: [tokenizer.decode(t.tokens[t.num_prompt :].tolist()) for t in traces.of(row)] for row in stream.rows()
    }


def test_rows_are_found_by_id_and_by_prompt_and_several_keep_their_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"id": "rows.jsonl/0", "completion": "1"},
        {"prompt": "12>", "completion": "2"},
        {"prompt": [{"role": "user", "content": "12>"}], "completion": "22"},
        {"messages": [{"role": "user", "content": "13>"}, {"role": "assistant", "content": "3"}]},
        {"prompt": "99>", "completion": "9"},
    ]
    traces, stream = traces_of(tmp_path, tokenizer, rows)
    traces.scan(stream.rows())
    found = texts(traces, stream, tokenizer)
    assert found == {f"rows.jsonl/{k}": v for k, v in enumerate([["1"], ["2", "22"], ["3"], [], [], []])}
    assert traces.report() == (
        "3 of 6 prompts have no demonstration and are sampled only: rows.jsonl/3, rows.jsonl/4, rows.jsonl/5"
    )


def test_a_column_gives_one_several_or_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    traces, stream = traces_of(tmp_path, tokenizer, demonstration_column="shown")
    traces.scan(stream.rows())
    found = list(texts(traces, stream, tokenizer).values())
    assert found == [["1111"], [], ["1313"], [], ["1515"], []]
    answers, stream = traces_of(tmp_path, tokenizer, demonstration_column="answer")
    assert list(texts(answers, stream, tokenizer).values()) == [[str(k)] for k in range(11, 17)]


def test_tokens_are_the_prompts_own_then_the_answer_and_its_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    traces, stream = traces_of(tmp_path, tokenizer, demonstration_column="answer")
    draw = stream.draw(1)[0]
    (traced,) = traces.of(draw.prompt.row)
    expected = [*draw.prompt.tokens, *tokenizer.encode(str(draw.prompt.row.answer)), tokenizer.eos_ids[0]]
    assert traced.tokens.tolist() == expected
    assert traced.num_prompt == len(draw.prompt.tokens)
    assert traced.logp is None


def test_an_authors_log_probs_come_along_and_must_fit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "11>", "completion": "1", "logp": [-0.5, -0.25]}]
    traces, stream = traces_of(tmp_path, tokenizer, rows)
    traces.needs_logp = True
    traces.scan(stream.rows())
    first = next(iter(stream.rows()))
    assert traces.of(first)[0].logp == pytest.approx(np.array([-0.5, -0.25]))
    short, stream = traces_of(tmp_path, tokenizer, [{"prompt": "11>", "completion": "1", "logp": [-0.5]}])
    with pytest.raises(UserError, match="logp has 1 values, and the answer with its end has 2 tokens"):
        short.scan(stream.rows())
    bare, stream = traces_of(tmp_path, tokenizer, [{"prompt": "11>", "completion": "1"}])
    bare.needs_logp = True
    with pytest.raises(UserError, match="no `logp`, but algorithm"):
        bare.scan(stream.rows())


def test_answers_that_are_too_long_are_left_out_and_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "11>", "completion": "1" * 8}, {"prompt": "12>", "completion": "1" * 7}]
    traces, stream = traces_of(tmp_path, tokenizer, rows)
    traces.scan(stream.rows())
    assert [len(found) for found in texts(traces, stream, tokenizer).values()] == [0, 1, 0, 0, 0, 0]
    assert "5 of 6 prompts have no demonstration" in str(traces.report())
    assert "(1 are longer than 8 tokens)" in str(traces.report())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "99>", "completion": "9"}], "none of 6 training prompts has a demonstration"),
        ([{"prompt": "11>"}], "a demonstration needs `completion`"),
        ([{"completion": "1"}], "a demonstration needs `completion`"),
        ([{"messages": [{"role": "user", "content": "11>"}]}], "should end with an assistant message"),
        ([{"prompt": "11>", "completion": "1", "logp": [0.5, 0]}], "logp should be a list of log-probs"),
        ([{"prompt": "11>", "completion": "x"}], "shown.jsonl"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    rows: list[dict[str, Any]], words: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def scan() -> None:
        traces, stream = traces_of(tmp_path, tokenizer, rows)
        traces.scan(stream.rows())

    with pytest.raises(UserError) as error:
        scan()
    assert words in str(error.value)


def test_a_task_shows_its_train_side_alone(tokenizer: Tokenizer) -> None:
    source = {"task": "sort_digits", "options": {"num": 9}, "limit": 4}
    data = Data.model_validate({"train": {"task": "sort_digits"}, "demonstrations": source})
    assert sum(map(len, demonstrations_by_prompt(data.demonstrations, 0, None).values())) == 4
    held_out = Data.model_validate({"train": {"task": "sort_digits"}, "demonstrations": {**source, "split": "test"}})
    with pytest.raises(UserError, match="demonstrations come from the train split only; remove split"):
        PromptDemonstrations(held_out, tokenizer, 8, 0, None)


def test_an_unknown_column_names_those_there_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    traces, stream = traces_of(tmp_path, tokenizer, demonstration_column="showm")
    with pytest.raises(UserError, match=r"no column 'showm'.*did you mean .?shown"):
        traces.scan(stream.rows())


def test_a_prompt_is_the_same_as_text_and_as_a_users_message() -> None:
    assert prompt_key("1>") == prompt_key([{"role": "user", "content": "1>"}])
    assert prompt_key("1>") != prompt_key([{"role": "system", "content": "1>"}])


def test_a_prompt_says_more_than_an_id_which_may_be_the_files_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"id": "rows.jsonl/0", "prompt": "16>", "completion": "6"},
        {"id": "q-12", "prompt": "12>", "completion": "2"},
    ]
    traces, _ = traces_of(tmp_path, tokenizer, rows, demonstrations_per_group=1)
    assert set(traces._found) == {prompt_key("16>"), prompt_key("12>")}
    with pytest.raises(UserError, match="a demonstration needs `completion`, and"):
        traces_of(tmp_path, tokenizer, [{"id": None, "completion": "6"}], demonstrations_per_group=1)
