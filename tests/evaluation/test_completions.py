"""The file of completions: what it holds, and that it can be read back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from burnish.config.errors import UserError
from burnish.core.trajectory import TokenSequence, Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.evaluation.completions import completion_row, read_completions, write_completions


def row(sample: int, completion: str, reward: float | None) -> dict[str, Any]:
    """A row as an evaluation makes it."""
    mask = np.array([False, True, True, True])
    tokens = TokenSequence(np.arange(4), mask, np.zeros(4, np.float32), np.zeros(4, np.int32))
    extra = {"level": 3, "subject": "Algebra", "tests": ["a"], "type": None}
    prompt = Prompt(Row("d/0", "q", "d", 7, extra), "Q: q", [0])
    parts = {} if reward is None else {"number": reward}
    error = "boom" if reward is None else None
    trajectory = Trajectory("d/0", 0, sample, [tokens], "length", completion, reward, reward, parts, error)
    return completion_row(prompt, "number", trajectory)


ROWS = [row(0, "né\u2028 \\boxed{7}", 1.0), row(1, "x", None)]


def test_a_row_says_all_there_is_to_know() -> None:
    assert ROWS[0] == {
        "id": "d/0",
        "sample": 0,
        "data_source": "d",
        "tags": {"subject": "Algebra", "level": 3},
        "prompt": "Q: q",
        "completion": "né\u2028 \\boxed{7}",
        "answer": "7",
        "answered": "7",
        "formatted": True,
        "accuracy": 1.0,
        "reward": 1.0,
        "parts": {"number": 1.0},
        "length": 3,
        "finish": "length",
        "truncated": True,
        "timed_out": False,
        "error": None,
    }
    assert (ROWS[1]["answered"], ROWS[1]["formatted"], ROWS[1]["error"]) == (None, False, "boom")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    write_completions(tmp_path / name, ROWS)
    assert read_completions(tmp_path / name) == ROWS


def test_parquet_has_a_type_a_column(tmp_path: Path) -> None:
    write_completions(tmp_path / "a.parquet", ROWS)
    types = {field.name: str(field.type) for field in pq.ParquetFile(tmp_path / "a.parquet").schema_arrow}
    assert (types["accuracy"], types["sample"], types["formatted"], types["parts"]) == (
        "double",
        "int64",
        "bool",
        "string",
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_lone_surrogate_does_not_cost_the_evaluation(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write_completions(path, [row(0, "a\ud800b", 1.0)])
    assert b"a?b" in path.read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"question": 1}\n', "has no column 'id'"),
        ("{\n", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]\n", "not an object"),
    ],
)
def test_a_file_that_holds_no_completions_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        read_completions(tmp_path / "a.jsonl")


def test_lines_are_one_object_each(tmp_path: Path) -> None:
    write_completions(tmp_path / "a.jsonl", ROWS)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().split("\n")[:-1]] == ROWS
