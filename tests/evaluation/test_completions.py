"""The file of completions: what it holds, and that it can be read back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from burnish.config.errors import UserError
from burnish.core.trajectory import Trajectory, chain_nodes
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.evaluation.completions import PartialCompletions, completion_row, read_completions, write_completions


def row(sample: int, completion: str, reward: float | None) -> dict[str, Any]:
    """A row as an evaluation makes it."""
    mask = np.array([False, True, True, True])
    nodes = chain_nodes(np.arange(4), mask, np.zeros(4, np.float32), np.zeros(4, np.int32))
    extra = {"level": 3, "subject": "Algebra", "tests": ["a"], "type": None}
    prompt = Prompt(Row("d/0", "q", "d", 7, extra), "Q: q", [0])
    parts = {} if reward is None else {"number": reward}
    error = "boom" if reward is None else None
    trajectory = Trajectory("d/0", 0, sample, nodes, "length", completion, reward, reward, parts, error)
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


# The partial file: a killed evaluation resumes, and an error names settings that differ.

SETTINGS: dict[str, Any] = {"sampling.n": 2, "sampling.temperature": 1.0, "model.content": "abc"}


def rows(*samples: int) -> list[dict[str, Any]]:
    return [{"id": "q/0", "sample": sample, "completion": "a\nb\u2028c"} for sample in samples]


def test_it_goes_on_with_what_it_has_and_goes_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    with PartialCompletions(path, SETTINGS) as journal:
        journal.add(rows(0, 1))
    with PartialCompletions(path, SETTINGS) as journal:
        assert journal.rows == rows(0, 1)
        journal.add(rows(2))
        assert journal.rows == rows(0, 1, 2)
        journal.close(remove=True)
    assert not path.exists()


def test_a_kill_at_any_byte_keeps_every_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    journal = PartialCompletions(path, SETTINGS)
    for sample in range(3):
        journal.add(rows(sample))
    journal.close()
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        journal = PartialCompletions(path, SETTINGS)
        whole = sum(end <= size for end in ends) - 1
        assert journal.rows == rows(*range(max(0, whole)))
        journal.add(rows(9))
        journal.close()
        again = PartialCompletions(path, SETTINGS)
        assert again.rows == [*rows(*range(max(0, whole))), *rows(9)]
        again.close()


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    journal = PartialCompletions(path, SETTINGS)
    journal.add(rows(0))
    journal.close()
    with pytest.raises(
        UserError, match=r"(?s)other settings:\n  sampling\.n: 2 there, 4 now\n  sampling\.top_k: None there, 5 now\n"
    ):
        PartialCompletions(path, {**SETTINGS, "sampling.n": 4, "sampling.top_k": 5})
    PartialCompletions(path, dict(reversed(SETTINGS.items()))).close()


def test_two_at_once_are_refused_and_a_stranger_too(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    with PartialCompletions(path, SETTINGS), pytest.raises(UserError, match="being written by another"):
        PartialCompletions(path, SETTINGS)
    assert not path.exists()  # nothing was in it
    path.write_text("hello\n")
    with pytest.raises(UserError, match="is no journal"):
        PartialCompletions(path, SETTINGS)
    assert path.read_text() == "hello\n"


def test_a_long_answer_is_named_by_its_beginning_and_its_checksum() -> None:
    from burnish.data.row import MAX_ANSWER_CHARS, answer_text

    assert answer_text("x" * MAX_ANSWER_CHARS) == "x" * MAX_ANSWER_CHARS
    long, other = ("x" * MAX_ANSWER_CHARS + end for end in "ab")
    assert len(answer_text(long)) < MAX_ANSWER_CHARS + 120
    assert answer_text(long) != answer_text(other)
    assert answer_text(long).endswith(hashlib.sha256(long.encode()).hexdigest() + ")")
