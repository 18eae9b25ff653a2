"""metrics.jsonl: one line a step, the numbers a run is judged by.

A float is written so that it reads back bit for bit. NaN and infinities, which JSON does not have, are the strings
"nan", "inf" and "-inf" and read back as floats. Names that start with one of `MEASURED` are the only ones that differ
between two runs of one config.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from burnish.config.errors import UserError, unknown_name_error
from burnish.run.checkpoint.checkpoints import print_to_stderr
from burnish.run.durable_files import append_durably, atomic_write, truncate

MetricValue = float | int | str
MACHINE_PREFIXES = ("time/", "performance/", "memory/", "controller/")
"""Of the machine, not of the computation."""
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


HELD_OUT_FIGURES = {"accuracy": "held-out accuracy", "reward_mean": "held-out reward"}
"""What a validation is summed up by, the first that was measured, with what people are told it is."""


def held_out_figures(names: Iterable[str]) -> dict[str, str]:
    """The figure of each validation mode among the names of metrics: `{"greedy": "accuracy"}`, or `reward_mean` where rewards are graded."""
    found: dict[str, set[str]] = {}
    for name in names:
        if match := re.fullmatch(r"validation/([^/]+)/([^/]+)", name):
            found.setdefault(match[1], set()).add(match[2])
    return {
        mode: next(f for f in HELD_OUT_FIGURES if f in there)
        for mode, there in found.items()
        if there & HELD_OUT_FIGURES.keys()
    }


def format_line(step: int, values: dict[str, MetricValue]) -> str:
    """The line of one step, without the newline: `step` first, then the names in order."""
    if "step" in values:
        raise ValueError("'step' is the line's own key and cannot name a metric")
    return json.dumps({"step": step} | {name: _json_value(values[name]) for name in sorted(values)}, allow_nan=False)


def parse_line(line: str) -> dict[str, Any]:
    """The values of one line; raises ValueError where it is not one."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not an object with a whole number 'step'")
    return {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines in order; none where the file does not exist yet. A last line without its newline is still being written."""
    return [row for _, row in _parsed_lines(path)] if path.exists() else []


class MetricsFile:
    """The writer of one metrics.jsonl; opening it cuts a last line that a kill tore."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                truncate(path, whole)

    def append(self, step: int, values: dict[str, MetricValue]) -> None:
        """Write one step's line; it is on disk when this returns."""
        line = format_line(step, values) + "\n"
        try:
            append_durably(self.path, line.encode())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error

    def truncate_after(self, step: int) -> list[str]:
        """Drop the lines of later steps and a torn last line, all at once: the run goes on after `step`.

        Returns what to tell the user: lines that cannot be read (the file with them is kept under another name) and steps without one.
        """
        kept, damaged = list[tuple[str, int]](), list[int]()
        for number, line in enumerate(_whole_lines(self.path), 1) if self.path.exists() else ():
            try:
                found = parse_line(line)["step"]
                kept += [(line, found)] if found <= step else []
            except ValueError:
                damaged.append(number)
        remarks = []
        if damaged:
            damaged_copy = self.path.with_name(f"{self.path.stem}.damaged{self.path.suffix}")
            atomic_write(damaged_copy, self.path.read_bytes())
            remarks.append(
                f"{self.path}: {_listed('line', damaged)} cannot be read and left out; the file as it was is {damaged_copy}"
            )
        if self.path.exists():
            atomic_write(self.path, "".join(line + "\n" for line, _ in kept))
        if missing := sorted(set(range(1, step + 1)) - {found for _, found in kept}):
            remarks.append(
                f"{self.path} has no line of {_listed('step', missing)}: it was cut, deleted or damaged. The weights do not depend on it; restore "
                "the file from a copy to have whole curves"
            )
        return remarks


def _listed(what: str, numbers: list[int]) -> str:
    """`step 3`, or `steps 3 to 7 (4 in all)`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {numbers[0]} to {numbers[-1]} ({len(numbers)} in all)"


def _whole_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").split("\n")[:-1]


def _parsed_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            yield line, parse_line(line)
        except ValueError as error:
            raise UserError(
                f'{path}, line {number}: not a line of metrics ({error}); expected JSON like {{"step": 3, "reward/mean": 0.5}}'
            ) from error


def _json_value(value: MetricValue) -> MetricValue:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value


# --- Trackers: the same metrics, also in TensorBoard or Weights & Biases.
#
# `metrics.jsonl` is the record; a tracker is a convenience. So one that is missing is an error before training starts, and
# one that fails later is reported once, switched off, and never stops the run.


class Tracker(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, values: dict[str, MetricValue]) -> None:
        """Take one step's metrics."""

    def close(self) -> None:
        """Send what is left."""


def make_trackers(
    names: Sequence[str], run_directory: Path, config: dict[str, Any], report: Callable[[str], None] = print_to_stderr
) -> list[Tracker]:
    """The trackers of a run by name; `config` is shown beside the curves where the tracker can."""
    check_trackers(names)
    return [GuardedTracker(name, TRACKERS[name](run_directory, config, report), report) for name in names]


def check_trackers(names: Sequence[str]) -> None:
    """Whether every tracker is known and installed, before a run directory is made for it."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name_error("tracker", name, TRACKERS)
        _import_tracker(name, name)


class GuardedTracker:
    """A tracker whose failures are reported once and end it, not the run."""

    def __init__(self, name: str, tracker: Tracker, report: Callable[[str], None]) -> None:
        self.name = name
        self.report = report
        self._tracker: Tracker | None = tracker

    def log(self, step: int, values: dict[str, MetricValue]) -> None:
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


class TensorBoardTracker:
    """TensorBoard event files in `<run>/tensorboard`, through TensorBoard's own writer (no torch, no tensorflow)."""

    def __init__(self, run_directory: Path, config: dict[str, Any], report: Callable[[str], None]) -> None:
        self._event = _import_tracker("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _import_tracker("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        writer = _import_tracker("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(run_directory / "tensorboard"))
        self._started = False

    def log(self, step: int, values: dict[str, MetricValue]) -> None:
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


class WandbTracker:
    """Weights & Biases; offline where no account is set up, so that it never asks and never waits.

    The id is kept in the run directory: a resumed run goes on as the same W&B run.
    """

    def __init__(self, run_directory: Path, config: dict[str, Any], report: Callable[[str], None]) -> None:
        wandb = _import_tracker("wandb", "wandb")
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

    def log(self, step: int, values: dict[str, MetricValue]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, dict[str, Any], Callable[[str], None]], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def _import_tracker(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"run.trackers names {package}, which is not installed ({error}): pip install 'burnish[track]', or leave it out"
        ) from error
