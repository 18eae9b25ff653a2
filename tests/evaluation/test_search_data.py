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
        "search": {"tokens": 50, "verifier": "oracle", "tree": TREE},
    }
    path = tmp_path / "searched.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def data(*words: object) -> int:
    return main(["data", *map(str, words)])


def test_paths_of_steps_become_rows_and_rollouts_do_not(completions: Path, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    assert data("steps", completions, out) == 0
    assert rows(out) == [
        {
            "prompt": "2+2?",
            "steps": ["two and two", "is four", "4"],
            "values": [0.75, 0.5, 1.0],
            "counts": [4, 2, 1],
            "id": "rows.jsonl/0",
        },
        {"prompt": "2+2?", "steps": ["five"], "values": [0.0], "counts": [1], "id": "rows.jsonl/0"},
    ]


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
    assert data("steps", searched, labels, "--step", "1", "--prompts", source) == 0
    for row in rows(labels):
        assert len(row["steps"]) == len(row["values"]) == len(row["counts"])
        is_right = "1".join(row["steps"]) in (row["prompt"].rstrip(">"), row["prompt"].rstrip(">").removesuffix("1"))
        assert row["values"][-1] == 1.0 or not is_right
    before = searched.stat().st_mtime_ns
    assert data("reject", source, out, *search, *words) == 0
    assert searched.stat().st_mtime_ns == before


def test_options_of_a_search_without_one_are_refused(
    completions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data("reject", completions, tmp_path / "out.jsonl", "--model", "m") != 0
    assert "--model has no effect without --strategy" in capsys.readouterr().err
    assert data("reject", completions, tmp_path / "out.jsonl", "--strategy", "majority") != 0
    assert "--strategy needs --model" in capsys.readouterr().err
