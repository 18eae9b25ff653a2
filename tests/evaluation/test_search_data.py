"""Trees of searches as training data: which paths become rows of steps, and which answers become demonstrations."""

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.data import Source, Template
from burnish.config.schema import StepValues
from burnish.data.preference_pairs import EncodingOptions
from burnish.data.step_values import load_stepped_answers
from burnish.models.tokenizer import Tokenizer
from tests.trainers.tiny import TINY, WARM, run_of


def node(
    index: int, parent: int | None, text: str, score: float | None = None, end: str = "open", **notes: Any
) -> dict:
    return {
        "node": index,
        "parent": parent,
        "text": text,
        "tokens": len(text),
        "sampled": parent is not None,
        "end": end,
        "score": score,
        "chosen": False,
        **notes,
    }


TREE = [
    node(0, None, "2+2?"),
    node(1, 0, "two and two\n\n", value=0.75, visits=4),
    node(2, 1, "is four\n\n", value=0.5, visits=2),
    node(3, 2, "4", 1.0, "stop", value=1.0, visits=1),
    node(4, 1, "then\n\nit is 5", 0.0, "stop"),
    node(5, 2, "so it\n\nis 4", 1.0, "stop"),
    node(9, 1, "\n\n", 0.0, "stop"),
    node(6, 0, "five", 0.0, "stop", value=0.0, visits=1),
    node(7, None, "is it right?"),
    node(8, 7, "yes", None, "stop"),
]


@pytest.fixture
def completions(tmp_path: Path) -> Path:
    record = {
        "id": "rows.jsonl/0",
        "sample": 0,
        "prompt": "2+2?",
        "completion": "two and two\n\nis four\n\n4",
        "accuracy": 1.0,
        "length": 24,
        "answer": "4",
        "search": {"tokens": 50, "strategy": "mcts", "verifier": "oracle", "step": "\n\n", "tree": TREE},
    }
    path = tmp_path / "searched.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def data(*words: object) -> int:
    return main(["data", *map(str, words)])


@pytest.mark.parametrize("delimiter", ["\n\n", "<s>"])
def test_paths_of_steps_become_rows_and_rollouts_do_not(completions: Path, tmp_path: Path, delimiter: str) -> None:
    if delimiter == "<s>":  # a special token, which has no text
        record = rows(completions)[0]
        tree = [
            n | {"text": n["text"].replace("\n\n", ""), "step_text": n["text"].replace("\n\n", "<s>")} for n in TREE
        ]
        record["search"] |= {"step": "<s>", "tree": tree}
        completions.write_text(json.dumps(record) + "\n")
    out = tmp_path / "steps.jsonl"
    assert data("steps", completions, out) == 0
    assert rows(out) == [
        {
            "prompt": "2+2?",
            "steps": ["two and two", "is four", "4"],
            "values": [0.75, 0.5, 1.0],
            "counts": [4, 2, 1],
            "finished": True,
            "id": "rows.jsonl/0",
        },
        {
            "prompt": "2+2?",
            "steps": ["five"],
            "values": [0.0],
            "counts": [1],
            "finished": True,
            "id": "rows.jsonl/0",
        },
    ]
    manifest = json.loads((tmp_path / "steps.jsonl.manifest.json").read_text())
    assert manifest["asked"]["delimiter"] == delimiter


def test_paths_that_go_on_are_unfinished_and_texts_that_were_cut_off_are_no_steps(
    completions: Path, tmp_path: Path
) -> None:
    """An open leaf and a step whose end is not the answer's are scored at the delimiter. A row of each kind is no repetition."""
    tree = [
        node(0, None, "2+2?"),
        node(1, 0, "two\n\n", value=0.5, visits=4),
        node(2, 1, "is fou", 0.25, "length", value=0.25, visits=1),
        node(3, 0, "five\n\n", value=0.0, visits=2),
        node(4, 3, "so\n\n", value=0.125, visits=2),
        node(5, 0, "five", 0.0, "stop", value=0.0, visits=1),
        node(6, 0, "four", value=0.75, visits=2),
        node(7, 6, " or so\n\n", value=0.5, visits=2),
    ]
    record = rows(completions)[0]
    record["search"]["tree"] = tree
    completions.write_text(json.dumps(record) + "\n")
    out = tmp_path / "steps.jsonl"
    assert data("steps", completions, out) == 0
    assert [(row["steps"], row["values"], row["finished"]) for row in rows(out)] == [
        (["two"], [0.5], False),
        (["five", "so"], [0.0, 0.125], False),
        (["five"], [0.0], True),
    ]
    assert json.loads((tmp_path / "steps.jsonl.manifest.json").read_text())["left_out"] == {
        "paths without a step that has a value": 1,
        "steps or rollouts that were cut off before they ended": 2,
    }
    tokenizer = Tokenizer.from_characters("".join(sorted(set("2+?two fivesour\n"))))
    answers, left_out = load_stepped_answers(
        [Source(path=str(out))], EncodingOptions(tokenizer, Template(), max_tokens=100), StepValues()
    )
    texts = [tokenizer.decode(answer.tokens, skip_special=False) for answer in answers]
    assert texts == ["2+2?two\n\n", "2+2?five\n\nso\n\n", "2+2?five<eos>"]
    assert [answer.positions for answer in answers] == [[8], [9, 13], [8]]
    assert not left_out.notes


def with_step(completions: Path, *steps: object) -> None:
    """Write the row once for each step of its search; `...` is a row that does not say it."""
    record = rows(completions)[0]
    lines = []
    for step in steps:
        search = {key: value for key, value in record["search"].items() if key != "step"}
        lines.append(json.dumps(record | {"search": search if step is ... else search | {"step": step}}) + "\n")
    completions.write_text("".join(lines))


@pytest.mark.parametrize(
    ("steps", "words", "reason"),
    [
        (["\n\n"], ["--step", "\n"], r"--step '\n', but the steps of this search ended with '\n\n'"),
        ([None], [], "strategy.step is null"),
        ([None], ["--step", "\n\n"], "strategy.step is null"),
        ([...], [], "does not say what ended a step of its search (mcts)"),
        (["\n\n", "\n"], [], r"ended with '\n', and those before it with '\n\n'"),
    ],
)
def test_steps_that_the_model_did_not_write_are_refused(
    completions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: list, words: list[str], reason: str
) -> None:
    with_step(completions, *steps)
    assert data("steps", completions, tmp_path / "steps.jsonl", *words) != 0
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "steps.jsonl").exists()


def test_completions_that_do_not_say_their_step_need_it_as_an_option(completions: Path, tmp_path: Path) -> None:
    said, given = tmp_path / "said.jsonl", tmp_path / "given.jsonl"
    assert data("steps", completions, said) == 0
    with_step(completions, ...)
    assert data("steps", completions, given, "--step", "\n\n") == 0
    assert rows(given) == rows(said)


def test_steps_with_few_continuations_have_no_label(completions: Path, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    assert data("steps", completions, out, "--min-count", 3, "--mixed") == 0
    assert [row["values"] for row in rows(out)] == [[0.75, None, 1.0]]


def test_the_rows_are_read_by_the_trainer_of_step_reward_models(completions: Path, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    data("steps", completions, out)
    tokenizer = Tokenizer.from_characters("".join(sorted(set("2+?two andisfourve45\n"))))
    options = EncodingOptions(tokenizer, Template(), max_tokens=100)
    answers, left_out = load_stepped_answers([Source(path=str(out))], options, StepValues())
    assert [answer.values for answer in answers] == [[0.75, 0.5, 1.0], [0.0]]
    assert not left_out.notes


def test_all_finished_answers_of_a_tree_can_become_demonstrations(completions: Path, tmp_path: Path) -> None:
    out = tmp_path / "right.jsonl"
    assert data("reject", completions, out, "--trees", "--most", 5) == 0
    assert [row["completion"] for row in rows(out)] == [
        "two and two\n\nis four\n\n4",
        "two and two\n\nis four\n\nso it\n\nis 4",
    ]
    assert data("reject", completions, tmp_path / "chosen.jsonl", "--most", 5) == 0
    assert len(rows(tmp_path / "chosen.jsonl")) == 1


def test_a_tree_that_another_verifier_scored_does_not_tell_right_from_wrong(
    completions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completions.write_text(completions.read_text().replace('"oracle"', '"likelihood"'))
    assert data("reject", completions, tmp_path / "right.jsonl", "--trees") != 0
    assert "without the answer key" in capsys.readouterr().err


def test_completions_without_trees_are_refused(
    completions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = rows(completions)[0]
    del record["search"]["tree"]
    completions.write_text(json.dumps(record) + "\n")
    assert data("steps", completions, tmp_path / "steps.jsonl") != 0
    assert "--keep-trees" in capsys.readouterr().err


def test_rows_are_searched_first_and_become_labels_and_demonstrations(tmp_path: Path) -> None:
    """From a model and rows to a file for a step reward model and one for SFT, and the same command finds its work done."""
    run = run_of(tmp_path / "run", TINY + WARM, ["training.steps=1", "warm_start.updates=40"])
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{k}>", "answer": f"{k}"}) + "\n" for k in range(12, 22)))
    out, words = (
        tmp_path / "right.jsonl",
        ["strategy.n=3", "strategy.rollouts=2", "strategy.step=1", "reward.parts=[exact]"],
    )
    search = ["--strategy", "step_values", "--model", run, "--trees"]
    assert data("reject", source, out, *search, *words) == 0
    found = rows(out)
    assert found
    assert all(row["completion"] == row["prompt"].rstrip(">") for row in found)
    labels = tmp_path / "steps.jsonl"
    searched = tmp_path / "right.completions.jsonl"
    assert {row["search"]["step"] for row in rows(searched)} == {"1"}
    assert data("steps", searched, labels, "--prompts", source) == 0
    for row in rows(labels):
        assert len(row["steps"]) == len(row["values"]) == len(row["counts"])
        is_right = "1".join(row["steps"]) in (row["prompt"].rstrip(">"), row["prompt"].rstrip(">").removesuffix("1"))
        assert row["values"][-1] == 1.0 or not is_right or not row["finished"]
    before = searched.stat().st_mtime_ns
    assert data("reject", source, out, *search, *words) == 0
    assert searched.stat().st_mtime_ns == before
    assert data("reject", source, out, *search, *words, "seed=1") != 0  # other settings than those of the completions
    assert searched.stat().st_mtime_ns == before
    assert data("reject", source, out, *search, *words, "seed=1", "--force") == 0
    assert searched.stat().st_mtime_ns != before


@pytest.mark.parametrize(
    ("strategy", "words", "reason"),
    [
        ("majority", [], "majority has no verifier"),
        ("user.py:choose", [], "user.py:choose has no verifier"),
        ("best_of_n", [], "scored by likelihood"),
        ("mcts", ["strategy.verifier=self_certainty"], "scored by self_certainty"),
        ("step_values", ["strategy.verifier.name=likelihood"], "scored by likelihood"),
    ],
)
def test_trees_without_scores_of_the_answer_key_are_refused_before_anything_is_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str, words: list[str], reason: str
) -> None:
    """The model does not exist, which an evaluation would say first."""
    search = ["--strategy", strategy, "--model", tmp_path / "none", "--trees", *words]
    assert data("reject", tmp_path / "rows.jsonl", tmp_path / "out.jsonl", *search) != 0
    said = capsys.readouterr().err
    assert reason in said
    assert "strategy.verifier=oracle" in said


def test_options_of_a_search_without_one_are_refused(
    completions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data("reject", completions, tmp_path / "out.jsonl", "--model", "m") != 0
    assert "--model has no effect without --strategy" in capsys.readouterr().err
    assert data("reject", completions, tmp_path / "out.jsonl", "--strategy", "majority") != 0
    assert "--strategy needs --model" in capsys.readouterr().err
