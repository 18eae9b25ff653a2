"""Preference data: the accepted formats, what is left out, and what is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Source, Template
from burnish.config.errors import UserError
from burnish.data.preference_pairs import EncodingOptions, LeftOutRows, PreferencePair, load_labelled, load_pairs
from burnish.data.tasks.registry import make_preferences, score_answer
from burnish.models.tokenizer import Tokenizer

LETTERS = "".join(map(chr, range(32, 127))) + "\n"
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
ASK = {"role": "user", "content": "2+2?"}
FOUR, FIVE = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5!"}


def reading(template: str | None = None, max_tokens: int = 100, **more: Any) -> EncodingOptions:
    inner = Tokenizer.from_characters(LETTERS)._inner
    inner.chat_template = template
    return EncodingOptions(Tokenizer(inner), Template(), max_tokens, **more)


def source(folder: Path, *rows: dict[str, Any], **more: Any) -> list[Source]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [Source(path=str(folder / "rows.jsonl"), **more)]


def texts(pair: PreferencePair, how: EncodingOptions) -> list[tuple[str, str]]:
    """Prompt and answer of both, as text."""
    found = []
    for example in (pair.chosen, pair.rejected):
        at = example.mask.index(True)
        parts = example.tokens[:at], example.tokens[at:]
        found.append(tuple(how.tokenizer.decode(part, skip_special=False) for part in parts))
    return found


def test_texts_are_a_prompt_and_two_answers_with_their_end_token(tmp_path: Path) -> None:
    how = reading()
    rows = source(tmp_path, {"prompt": "2+2=", "chosen": "4", "rejected": "55", "margin": 2})
    (pair,), left_out = load_pairs(rows, how)
    assert texts(pair, how) == [("2+2=", "4<eos>"), ("2+2=", "55<eos>")]
    assert (pair.id, pair.margin, left_out) == ("rows.jsonl/0", 2.0, LeftOutRows(longest=100))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5!"},
        {"prompt": "2+2?", "chosen": [ASK, FOUR], "rejected": [ASK, FIVE]},
        {"chosen": [ASK, FOUR], "rejected": [ASK, FIVE]},
        {"prompt": None, "chosen": [ASK, FOUR], "rejected": [ASK, FIVE]},
        {"question": "2+2?", "chosen": "4", "rejected": "5!"},
        {
            "conversations": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5!"},
        },
    ],
    ids=["messages", "texts", "the prompt repeated", "conversations", "an empty column", "a question", "ShareGPT"],
)
def test_every_shape_of_a_pair_is_the_same_pair(row: dict[str, Any], tmp_path: Path) -> None:
    how = reading(CHAT)
    (pair,), _ = load_pairs(source(tmp_path, row), how)
    assert texts(pair, how) == [("[user]2+2?;[assistant]", "4;<eos>"), ("[user]2+2?;[assistant]", "5!;<eos>")]


def test_conversations_part_where_they_first_differ(tmp_path: Path) -> None:
    first = [ASK, FOUR, {"role": "user", "content": "sure?"}]
    row = {"chosen": [*first, FOUR], "rejected": [*first, FIVE]}
    how = reading(CHAT)
    (pair,), _ = load_pairs(source(tmp_path, row), how)
    assert texts(pair, how)[1] == ("[user]2+2?;[assistant]4;[user]sure?;[assistant]", "5!;<eos>")


@pytest.mark.parametrize("template", [None, CHAT])
@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        ("Q: 2+2? A: 4", "Q: 2+2? A: five", "Q: 2+2? A:", (" 4", " five")),
        ("Human: hi\n\nAssistant: Good day", "Human: hi\n\nAssistant: Goodbye", "Human: hi\n\nAssistant:", None),
        ("2+2=4", "2+2=4, no", "2+2=", ("4", "4, no")),
    ],
)
def test_whole_texts_part_at_a_word_and_stand_without_a_template(
    tmp_path: Path, template: str | None, chosen: str, rejected: str, prompt: str, answers: tuple[str, str] | None
) -> None:
    how = reading(template)
    (pair,), _ = load_pairs(source(tmp_path, {"chosen": chosen, "rejected": rejected}), how)
    answers = answers or (chosen[len(prompt) :], rejected[len(prompt) :])
    assert texts(pair, how) == [(prompt, f"{answers[0]}<eos>"), (prompt, f"{answers[1]}<eos>")]


def test_labels_and_pairs_give_good_and_bad_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"question": "c", "response": "d", "label": 0},
        {"prompt": "e", "chosen": "f", "rejected": "g"},
    ]
    answers, _ = load_labelled(source(tmp_path, *rows), reading())
    assert [(a.id, a.is_good) for a in answers] == [
        ("rows.jsonl/0", True),
        ("rows.jsonl/1", False),
        ("rows.jsonl/2/chosen", True),
        ("rows.jsonl/2/rejected", False),
    ]


def test_what_is_too_long_or_prefers_nothing_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "chosen": "same", "rejected": "same"},
        {"prompt": "p", "chosen": "a", "rejected": "b" * 20},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
    ]
    pairs, left_out = load_pairs(source(tmp_path, *rows), reading(max_tokens=10))
    assert [p.id for p in pairs] == ["rows.jsonl/2"]
    assert left_out.notes == [
        "1 rows are longer than 10 tokens and were left out",
        "1 pairs have the same answer twice and were left out",
    ]
    with pytest.raises(UserError, match="22 tokens, more than max_tokens=10"):
        load_pairs(source(tmp_path, *rows), reading(max_tokens=10, overlong="error"))
    with pytest.raises(UserError, match=r"no pairs left in rows\.jsonl"):
        load_pairs(source(tmp_path, rows[0]), reading())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected'; a pair has prompt, chosen and rejected"),
        ({"chosen": "a b", "rejected": "c d"}, "do not begin with the same words"),
        ({"chosen": "a b", "rejected": [FIVE]}, "one of chosen and rejected is a text"),
        ({"prompt": "x", "chosen": "4", "rejected": "5", "audios": ["a.wav"]}, "column 'audios' has a value"),
        ({"prompt": "x", "chosen": "4", "rejected": "5", "tools": ["f"]}, "column 'tools' asks for tools"),
        ({"chosen": [FOUR], "rejected": [FIVE]}, "no first message in common"),
        ({"prompt": "x", "chosen": [ASK, FOUR], "rejected": "5"}, "does not repeat the prompt"),
        ({"prompt": "x", "chosen": 4, "rejected": "5"}, "chosen should be text or a list of messages"),
        ({"prompt": "x", "chosen": "4", "rejected": "5", "margin": -1}, "margin should be a number of 0 or more"),
    ],
)
def test_a_row_that_is_no_pair_is_explained(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_pairs(source(tmp_path, row), reading())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "no column 'label'"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label should be true"),
    ],
)
def test_a_row_that_is_no_labelled_answer_is_explained(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_labelled(source(tmp_path, row), reading())


def test_keys_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(UserError, match="no effect on rows of preferences"):
        load_pairs(source(tmp_path, row, prompt_key="q"), reading())
    with pytest.raises(UserError, match=r"weight=2\.0 has no effect"):
        load_pairs(source(tmp_path, row, weight=2.0), reading())


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_task_s_checker_takes_the_chosen_answer_and_refuses_the_rejected_one(split: str) -> None:
    rows = make_preferences("sort_digits", {"num": 50}, 3, split)
    assert len(rows) == 50
    for row in rows:
        right = "".join(sorted(row["prompt"][:-1]))
        assert score_answer("sort_digits", row["chosen"], right, {}) == 1
        assert score_answer("sort_digits", row["rejected"], right, {}) == 0
    other = make_preferences("sort_digits", {"num": 50}, 3, "test" if split == "train" else "train")
    assert not {row["chosen"] for row in rows} & {row["chosen"] for row in other}
    with pytest.raises(UserError, match="option of the preferences of 'sort_digits'"):
        make_preferences("sort_digits", {"clean": True}, 3, split)
    with pytest.raises(UserError, match="task 'addition' has no preferences"):
        make_preferences("addition", {}, 0, split)
