"""Trackers: the same metrics, also in TensorBoard or Weights & Biases.

`metrics.jsonl` is the record; a tracker is a convenience. So one that is missing is an error before training starts, and
one that fails later is reported once, switched off, and never stops the run.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from burnish.config.errors import UserError, unknown
from burnish.run.checkpoints import print_to_stderr
from burnish.run.files import atomic_write
from burnish.run.metrics import Value


class Tracker(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, values: dict[str, Value]) -> None:
        """Take one step's metrics."""

    def close(self) -> None:
        """Send what is left."""


def make_trackers(
    names: Sequence[str], run_directory: Path, config: dict[str, Any], report: Callable[[str], None] = print_to_stderr
) -> list[Tracker]:
    """The trackers of a run by name; `config` is shown beside the curves where the tracker can."""
    check_trackers(names)
    return [Guarded(name, MAKERS[name](run_directory, config, report), report) for name in names]


def check_trackers(names: Sequence[str]) -> None:
    """Whether every tracker is known and installed, before a run directory is made for it."""
    for name in names:
        if name not in MAKERS:
            raise unknown("tracker", name, MAKERS)
        _require(name, name)


class Guarded:
    """A tracker whose failures are reported once and end it, not the run."""

    def __init__(self, name: str, tracker: Tracker, report: Callable[[str], None]) -> None:
        self.name = name
        self.report = report
        self._tracker: Tracker | None = tracker

    def log(self, step: int, values: dict[str, Value]) -> None:
        self._call("log", step, values)

    def close(self) -> None:
        self._call("close")
        self._tracker = None

    def _call(self, method: str, *arguments: Any) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, method)(*arguments)
        except Exception as error:  # noqa: BLE001 -- someone else's code and network; the run's own record is metrics.jsonl
            self._tracker = None
            self.report(
                f"tracker {self.name} failed and is off for the rest of this run ({type(error).__name__}: {error}); metrics.jsonl has every value"
            )


class TensorBoard:
    """TensorBoard event files in `<run>/tensorboard`, through TensorBoard's own writer (no torch, no tensorflow)."""

    def __init__(self, run_directory: Path, config: dict[str, Any], report: Callable[[str], None]) -> None:
        self._event = _require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _require("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        writer = _require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(run_directory / "tensorboard"))
        self._started = False

    def log(self, step: int, values: dict[str, Value]) -> None:
        if not self._started:
            # A session start makes TensorBoard forget points of this step and later, written before a kill.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, session_log=start))
            self._started = True
        numbers = {name: float(value) for name, value in values.items() if not isinstance(value, str)}
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=self._summary(value=points)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; offline where no account is set up, so that it never asks and never waits.

    The id is kept in the run directory: a resumed run goes on as the same W&B run.
    """

    def __init__(self, run_directory: Path, config: dict[str, Any], report: Callable[[str], None]) -> None:
        wandb = _require("wandb", "wandb")
        id_file = run_directory / "wandb-id.txt"
        if not id_file.exists():
            atomic_write(id_file, uuid.uuid4().hex[:12] + "\n")
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        if mode == "offline":
            report(f"wandb: offline; `wandb sync {run_directory / 'wandb'}/offline-run-*` sends it later")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "burnish"),
            name=run_directory.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(run_directory),
            config=config,
            mode=mode,
        )

    def log(self, step: int, values: dict[str, Value]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


MAKERS: dict[str, Callable[[Path, dict[str, Any], Callable[[str], None]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


def _require(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"run.trackers names {package}, which is not installed ({error}): pip install 'burnish[track]', or leave it out"
        ) from error
