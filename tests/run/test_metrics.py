"""metrics.jsonl: exact numbers, valid JSON on every line, a clean cut on resume."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.run.metrics import GuardedTracker, MetricsFile, make_trackers, read_metrics


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


# Trackers get the same numbers and never stop a run.


def test_tensorboard_gets_every_number_and_no_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (tracker,) = make_trackers(["tensorboard"], tmp_path, {}, print)
    tracker.log(1, {"reward/mean": 0.25, "note": "text"})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.close()
    tracker.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = list(EventFileLoader(str(file)).Load())
    # The loader turns simple values into tensors, as TensorBoard itself does before drawing.
    points = [(e.step, v.tag, v.tensor.float_val[0]) for e in events for v in e.summary.value]
    assert points == [(1, "reward/mean", 0.25), (2, "reward/mean", 0.5)]


def test_wandb_is_offline_without_an_account_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, Any], int]] = []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((values, step)), finish=lambda: None)

    def init(**arguments: Any) -> Any:
        calls.append(arguments)
        return run

    wandb = types.SimpleNamespace(init=init, api=types.SimpleNamespace(api_key=None))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    said: list[str] = []
    for _ in range(2):
        (tracker,) = make_trackers(["wandb"], tmp_path, {"seed": 1}, said.append)
        tracker.log(3, {"x": 1.0})
        tracker.close()
    assert [c["mode"] for c in calls] == ["offline", "offline"]
    assert calls[0]["id"] == calls[1]["id"]
    assert calls[0]["config"] == {"seed": 1}
    assert logged == [({"x": 1.0}, 3)] * 2
    assert "wandb sync" in said[0]


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'burnish\[track\]'"):
        make_trackers(["wandb"], tmp_path, {}, print)


def test_an_unknown_tracker_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        make_trackers(["tensorbord"], tmp_path, {}, print)


def test_a_tracker_that_fails_is_reported_once_and_left_alone() -> None:
    calls: list[int] = []

    class Fails:
        def log(self, step: int, values: dict[str, Any]) -> None:
            calls.append(step)
            raise ConnectionError("no route")

        def close(self) -> None:
            raise AssertionError("closed after it was switched off")

    said: list[str] = []
    tracker = GuardedTracker("wandb", Fails(), said.append)
    for step in (1, 2):
        tracker.log(step, {})
    tracker.close()
    assert calls == [1]
    assert len(said) == 1
    assert "tracker wandb failed" in said[0]
    assert "no route" in said[0]


def test_ctrl_c_passes_through_a_tracker() -> None:
    class Interrupted:
        def log(self, step: int, values: dict[str, Any]) -> None:
            raise KeyboardInterrupt

        def close(self) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        GuardedTracker("x", Interrupted(), print).log(1, {})
