"""metrics.jsonl: exact numbers, valid JSON on every line, a clean cut on resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.run.metrics import MetricsFile, read_metrics


@settings(max_examples=100, deadline=None)
@given(value=st.floats())
def test_every_float_reads_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    MetricsFile(path).append(3, {"x": value})
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (row,) = read_metrics(path)
    assert isinstance(row["x"], float)
    assert row["x"] == value or (math.isnan(row["x"]) and math.isnan(value))
    assert math.copysign(1, row["x"]) == math.copysign(1, value) or math.isnan(value)


def test_a_line_is_the_step_and_then_the_names_in_order(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "m").append(2, {"b": 0.1, "a": 1, "c": "text", "d": float("-inf")})
    assert (tmp_path / "m").read_text() == '{"step": 2, "a": 1, "b": 0.1, "c": "text", "d": "-inf"}\n'


def test_truncating_keeps_the_bytes_of_earlier_steps(tmp_path: Path) -> None:
    path = tmp_path / "m"
    metrics = MetricsFile(path)
    kept = b""
    for step in range(6):
        metrics.append(step, {"x": step / 3, "nan": math.nan})
        if step == 3:
            kept = path.read_bytes()
    path.write_bytes(path.read_bytes() + b'{"step": 6, "x"')
    metrics.truncate_after(3)
    assert path.read_bytes() == kept
    metrics.append(4, {"x": 9.0})
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    metrics.truncate_after(-1)
    assert read_metrics(path) == []


@pytest.mark.parametrize("cut", range(1, 12))
def test_opening_cuts_a_torn_last_line(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m"
    MetricsFile(path).append(1, {})
    MetricsFile(path).append(2, {})
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut])
    assert [row["step"] for row in read_metrics(path)] == [1]
    MetricsFile(path).append(2, {"again": 1})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_a_damaged_line_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match="m, line 2: not a line of metrics"):
        read_metrics(tmp_path / "m")
    (tmp_path / "m").write_text('{"loss": 1}\n')
    with pytest.raises(UserError, match="line 1"):
        read_metrics(tmp_path / "m")


def test_a_run_without_metrics_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "m") == []
    MetricsFile(tmp_path / "m").truncate_after(0)
    assert not (tmp_path / "m").exists()


def test_step_cannot_be_a_metric(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step"):
        MetricsFile(tmp_path / "m").append(1, {"step": 2})
