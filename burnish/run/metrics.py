"""metrics.jsonl, with one line of metrics per step, and the trackers that send the same metrics elsewhere.

A float is written so that it reads back bit for bit. NaN and infinities, which JSON lacks, are the strings "nan", "inf"
and "-inf" and read back as floats. Only metrics with a prefix in `MACHINE_PREFIXES` differ between two runs of one config.

metrics.jsonl is the record, and a tracker (TensorBoard, Weights & Biases) is a convenience. A tracker that is not installed is an error
before training starts. A tracker that fails later is reported once, switched off, and never stops the run.
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
from burnish.config.extras import install_hint
from burnish.run.durable_files import append_durably, atomic_write, truncate

MetricValue = float | int | str
MACHINE_PREFIXES = ("time/", "performance/", "memory/", "controller/")
"""Prefixes of metrics that describe the machine, not the computation."""
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
HELD_OUT_FIGURES = {"accuracy": "held-out accuracy", "reward_mean": "held-out reward"}
"""Metrics that summarise a validation, by priority, with the words for them. The first one that was measured is used."""


def held_out_figures(names: Iterable[str]) -> dict[str, str]:
    """Return the summary metric of each validation mode: `{"greedy": "accuracy"}`, or `reward_mean` if rewards are graded."""
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
    """Return the line of one step without its newline: `step` first, then the sorted names."""
    if "step" in values:
        raise ValueError("'step' is a reserved key and cannot name a metric")
    return json.dumps({"step": step} | {name: _json_value(values[name]) for name in sorted(values)}, allow_nan=False)


def parse_line(line: str) -> dict[str, Any]:
    """Parse one line. Raises ValueError if it is damaged."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not an object with a whole number 'step'")
    return {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines in order; [] if there is no file. A last line without its newline is still being written."""
    return [row for _, row in _parsed_lines(path)] if path.exists() else []


class MetricsFile:
    """The writer of one metrics.jsonl. Opening the file removes a last line that a kill tore."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                truncate(path, whole)

    def append(self, step: int, values: dict[str, MetricValue]) -> None:
        """Append one step's line. It is on disk when this returns."""
        line = format_line(step, values) + "\n"
        try:
            append_durably(self.path, line.encode())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error

    def truncate_after(self, step: int) -> list[str]:
        """Atomically drop the lines of later steps and a torn last line, because the run resumes after `step`.

        Returns notes for the user: damaged lines (the damaged file is kept under another name) and steps without a line.
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
                f"{self.path}: skipped {_listed('line', damaged)}, which cannot be read; the original file is kept as {damaged_copy}"
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


class Tracker(Protocol):
    """A service that receives the metrics of a run."""

    def log(self, step: int, values: dict[str, MetricValue]) -> None:
        """Send one step's metrics."""

    def close(self) -> None:
        """Send everything that is still buffered."""


def make_trackers(
    names: Sequence[str], run_directory: Path, config: dict[str, Any], report: Callable[[str], None]
) -> list[Tracker]:
    """Return the trackers of a run by name. A tracker that can shows `config` beside the curves."""
    check_trackers(names)
    return [GuardedTracker(name, TRACKERS[name](run_directory, config, report), report) for name in names]


def check_trackers(names: Sequence[str]) -> None:
    """Raise a `UserError` for a tracker that is unknown or not installed. Called before the run directory is created."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name_error("tracker", name, TRACKERS)
        _import_tracker(name, name)


class GuardedTracker:
    """A tracker that is switched off at its first failure, so that it never ends the run."""

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
        except Exception as error:  # noqa: BLE001 -- third-party code and networks; the record is metrics.jsonl
            self._tracker = None
            self.report(
                f"tracker {self.name} failed and is off for the rest of this run ({type(error).__name__}: {error}); metrics.jsonl has every value"
            )


class TensorBoardTracker:
    """Event files in `<run>/tensorboard`, written by TensorBoard's own writer, without torch and tensorflow."""

    def __init__(self, run_directory: Path, config: dict[str, Any], report: Callable[[str], None]) -> None:
        self._event = _import_tracker("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _import_tracker("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        writer = _import_tracker("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(run_directory / "tensorboard"))
        self._started = False

    def log(self, step: int, values: dict[str, MetricValue]) -> None:
        if not self._started:
            # A session start makes TensorBoard drop points of this and later steps that were written before a kill.
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
    """Weights & Biases. Without an account it works offline, so that it never prompts and never waits.

    The id is kept in the run directory, so that a resumed run continues the same W&B run.
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
            f"run.trackers names {package}, which is not installed ({error}): {install_hint('track')}, or leave it out"
        ) from error
