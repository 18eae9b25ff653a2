"""Trackers: the same numbers elsewhere, and never a reason to stop."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.run.metrics import Guarded, make_trackers


def test_tensorboard_gets_every_number_and_no_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (tracker,) = make_trackers(["tensorboard"], tmp_path, {})
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
        make_trackers(["wandb"], tmp_path, {})


def test_an_unknown_tracker_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        make_trackers(["tensorbord"], tmp_path, {})


def test_a_tracker_that_fails_is_reported_once_and_left_alone() -> None:
    calls: list[int] = []

    class Fails:
        def log(self, step: int, values: dict[str, Any]) -> None:
            calls.append(step)
            raise ConnectionError("no route")

        def close(self) -> None:
            raise AssertionError("closed after it was switched off")

    said: list[str] = []
    tracker = Guarded("wandb", Fails(), said.append)
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
        Guarded("x", Interrupted(), print).log(1, {})
