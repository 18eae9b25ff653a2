"""Sample tables: what is written is what is read, null stays null."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.run.samples import COLUMNS, read_samples, sample_files, write_samples


def row(**changes: object) -> dict[str, object]:
    return {
        "group": "p7",
        "sample": 0,
        "data_source": "sort_digits",
        "prompt": "21>",
        "completion": "12",
        "answer": "12",
        "reward": 1.0,
        "accuracy": 1.0,
        "parts": {"task": 1.0},
        "advantage": 0.5,
        "truncated": False,
        "length": 2,
        "pieces": ["1", "2"],
        "logp": [-0.5, -0.25],
        "finish": None,
        "advantages": None,
        "gap": None,
        "turns": None,
        "details": None,
        "extra": {"mine/expected": "7"},
        "error": None,
    } | changes


def test_rows_read_back_with_step_and_kind(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 10, "train", [row(), row(sample=1, reward=None, error="Traceback")])
    assert path.name == "train-000010.parquet"
    first, second = read_samples(tmp_path)
    assert list(first) == list(COLUMNS)
    assert first == row() | {"step": 10, "kind": "train", "parts": '{"task": 1.0}', "extra": '{"mine/expected": "7"}'}
    assert second["reward"] is None
    assert second["error"] == "Traceback"


def test_tables_come_in_order_of_steps_and_any_kind_is_a_file_name(tmp_path: Path) -> None:
    write_samples(tmp_path, 20, "train", [row()])
    write_samples(tmp_path, 3, "validation-a/b", [row(advantage=None)])
    assert [r["kind"] for r in read_samples(tmp_path)] == ["validation-a/b", "train"]
    assert [step for step, _, _ in sample_files(tmp_path)] == [3, 20]


def test_an_empty_table_and_all_null_columns_are_fine(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "train", [])
    write_samples(tmp_path, 2, "train", [{"group": "g", "prompt": "p"}])
    (only,) = read_samples(tmp_path)
    assert only["pieces"] is None
    assert only["step"] == 2


def test_text_that_utf8_cannot_hold_does_not_stop_the_run(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "train", [row(prompt="a\ud800b", pieces=["\udfff", "x"])])
    (only,) = read_samples(tmp_path)
    assert (only["prompt"], only["pieces"]) == ("a?b", ["?", "x"])


def test_an_unknown_column_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'rewrad'; did you mean 'reward'"):
        write_samples(tmp_path, 1, "train", [row(rewrad=1)])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_table_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "train-000001.parquet").write_text("nonsense")
    with pytest.raises(UserError, match=r"train-000001\.parquet"):
        read_samples(tmp_path)


def test_values_of_tokens_read_back_with_their_gaps(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "train", [row(advantages=[0.5, None], gap=[-0.25, 0.125], finish="length"), row()])
    first, second = read_samples(tmp_path)
    assert (first["advantages"], first["gap"], first["finish"]) == ([0.5, None], [-0.25, 0.125], "length")
    assert (second["advantages"], second["gap"], second["finish"]) == (None, None, None)
