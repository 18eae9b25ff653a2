"""`Run`: everything that a trainer writes to a run directory. It commits steps, saves checkpoints and resumes.

The order of writes makes a kill harmless. A step's metrics and journal records are on disk before the next step starts, or before
its update where a validation waits for slow rewards (`trainers/while_scoring.py`).
A checkpoint is complete or absent. `resume` rewinds everything to the newest checkpoint, and the steps after it are
repeated identically. A checkpoint is written while the next steps run; the journal records it once it is on disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from burnish.config.errors import UserError
from burnish.config.schema import Run as RunConfig
from burnish.run.checkpoint.checkpoints import Checkpoint, Checkpoints
from burnish.run.checkpoint.saver import CheckpointSaver, TakeSnapshot
from burnish.run.display import Display
from burnish.run.journal import Journal, decode_record
from burnish.run.metrics import MetricsFile
from burnish.run.run_directory import RunDirectory, earlier_configs
from burnish.run.samples import EventExamplesFile, WorstTokensFile, write_samples
from burnish.run.supervisor.exit_status import END_EVENTS
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, Heartbeat, HeartbeatDisplay, process_seconds
from burnish.run.trackers.tracker_process import Trackers

PROMPTS_FIELD = "prompts"
"""Field of a `step` record in the journal: the values of a `PromptVisit` for each prompt of the step."""
StepListener = Callable[[int, dict[str, Any]], bool | None]
"""Called after each committed step with its number and metrics. True asks the run to stop, as Ctrl-C does."""


@dataclass(frozen=True)
class PromptVisit:
    """The outcome of one visit of a prompt. The journal keeps it even after the samples are gone."""

    prompt_id: str
    visit: int
    scored: int
    """Number of samples that were scored."""
    reward: float
    """Sum of the rewards of the scored samples."""
    judged: int
    """Number of samples that have an accuracy."""
    right: float
    """Sum of the accuracies."""

    def values(self) -> list[Any]:
        """Return the fields as the journal stores them."""
        return [self.prompt_id, self.visit, self.scored, self.reward, self.judged, self.right]


class Run:
    """The writer of one run directory. Use it in a `with` block."""

    def __init__(self, directory: RunDirectory, config: RunConfig, resolved: dict[str, Any]) -> None:
        self.directory = directory
        self.heartbeat = Heartbeat(directory.path / HEARTBEAT_FILE)
        self.display: Display = HeartbeatDisplay(directory.log, self.heartbeat)
        self.journal = Journal(directory.journal)
        self.metrics = MetricsFile(directory.metrics)
        self.worst_tokens = WorstTokensFile(directory.worst_tokens)
        self.events = EventExamplesFile(directory.events)
        self.checkpoints = Checkpoints(directory.checkpoints, config.keep_last, self.display.note)
        self.saver = CheckpointSaver(
            self.checkpoints, config.save == "background", self.display.note, self.display.phase
        )
        if directory.old_run is not None:
            self.display.note(f"the old run is now {directory.old_run}")
        for change in directory.changes:
            self.display.note(str(change))
        if directory.changes:
            self.display.note(f"the config from before is {earlier_configs(directory.path)[-1]}")
            changes = {change.key: [change.old, change.new] for change in directory.changes}
            self.journal.append("config", changes=changes)
        self.trackers = Trackers(config.trackers, directory.path, resolved, self.display.note)
        self.last_step = 0
        """The last committed step; after `resume`, the step of the checkpoint that the run continues from."""
        self.saved_step = 0
        """The step of the newest checkpoint, written or being written."""
        self.listeners: list[StepListener] = []
        """Functions of a Python program. An error that one raises ends the run; the step is committed by then."""
        self.stop_requested = False
        """Whether a listener asked the run to stop. The trainers read it after each step and save that step."""
        self._saving_times: dict[str, float] = {}  # since the last step's metrics
        self._blocked_s = 0.0  # by all checkpoints of this process
        self._is_failed = True  # until `end`

    def resume(self) -> Checkpoint | None:
        """Rewind metrics, worst tokens, events and journal to the newest checkpoint and return it; None for a new run."""
        latest = self.checkpoints.latest()
        step = -1 if latest is None else latest.step
        self.last_step = self.saved_step = max(step, 0)
        # Even if the journal is empty: a kill may have come between the metrics of step 0 and their journal record.
        for remark in self.metrics.truncate_after(step):
            self.display.note(remark)
        self.worst_tokens.truncate_after(step)
        self.events.truncate_after(step)
        if latest is None and self.journal.num_events == 0:
            return None
        self.journal.rewind(step)
        return latest

    def commit(self, step: int, values: dict[str, Any], used: list[str], visits: Sequence[PromptVisit] = ()) -> None:
        """Record a finished step: its metrics, the ids of the trajectories in its loss (`used`), and its prompt visits.

        Raises the error of a checkpoint that failed since the last step.
        """
        self._record(wait=False)
        elapsed_s = process_seconds()
        values = values | self._saving_times | {"time/elapsed_s": elapsed_s}
        if self._blocked_s:
            values["time/checkpoint_share"] = self._blocked_s / elapsed_s
        started = time.perf_counter()
        self.metrics.append(step, values)
        prompts = {PROMPTS_FIELD: [visit.values() for visit in visits]} if visits else {}
        self.journal.append_many([("used", {"step": step, "ids": used}), ("step", {"step": step, **prompts})])
        self._saving_times = {"time/commit_s": time.perf_counter() - started}
        self.last_step = step
        self.trackers.log(step, values)
        self.display.step(step, values)
        for listener in self.listeners:
            self.stop_requested |= listener(step, {"step": step, **values}) is True

    def samples(self, step: int, kind: str, rows: list[dict[str, Any]]) -> None:
        """Write a table of samples."""
        self.trackers.samples(step, kind, write_samples(self.directory.samples, step, kind, rows))

    def checkpoint(self, step: int, take: TakeSnapshot, score: float | None, metric: str | None = None) -> None:
        """Take a snapshot and start writing it. `score` is a value of `metric`.

        The journal records the checkpoint once it is on disk: in `wait`, or when a later step is committed.
        """
        started = time.perf_counter()
        self.wait()
        self.saver.begin(step, take, score, metric, self._sync)
        self.saved_step = step
        if not self.saver.in_background:
            self.wait()
        blocked_s = time.perf_counter() - started
        self._blocked_s += blocked_s
        self._saving_times["time/checkpoint_blocked_s"] = blocked_s

    def _sync(self) -> None:
        """Sync the files that a run resuming from a checkpoint needs up to its step. They are appended without a sync."""
        self.worst_tokens.sync()
        self.events.sync()

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        self._record(wait=True)

    def _record(self, wait: bool) -> None:
        """Record a finished checkpoint in the journal, and drop the attachments of the steps before it."""
        saved = self.saver.collect(wait)
        if saved is None:
            return
        self._saving_times["time/checkpoint_write_s"] = saved.write_s
        self.journal.append("checkpoint", step=saved.step, path=saved.path.name, score=saved.score)
        self.journal.drop_attachments(lambda name: int(name.split("-")[1]) > saved.step)

    def end(self, step: int, is_complete: bool) -> None:
        """Record that the run is complete, or that its user stopped it. The supervisor restarts a run without this record."""
        self.wait()
        self.journal.append("complete" if is_complete else "stopped", step=step)
        self._is_failed = False

    def close(self) -> None:
        """Wait for a checkpoint that is being written; then close the display, the trackers and the lock."""
        try:
            self.wait()
        finally:
            self.display.stop()
            self.trackers.close(self._is_failed)
            self.heartbeat.close()
            self.directory.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.wait()
        except Exception as other:  # noqa: BLE001 -- a second error must not hide the one that ended the run
            self.display.note(f"{type(other).__name__}: {other}")
        finally:
            self.close()


class FollowerRun(Run):
    """The run of a training process that does not own the run directory. It writes its part of checkpoints and nothing else.

    The owner process writes the steps, notes and metrics.
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.directory = RunDirectory(path)  # without the lock, which the owner holds
        self.stop_requested = False  # the owner asks its listeners, and all processes stop with it
        self._devnull = open(os.devnull, "w")  # noqa: SIM115 (closed with the run)
        self.display = Display(Path(os.devnull), self._devnull)
        self.checkpoints = Checkpoints(self.directory.checkpoints, config.keep_last, self.display.note)
        self.saver = CheckpointSaver(
            self.checkpoints, config.save == "background", self.display.note, self.display.phase
        )

    def resume(self) -> Checkpoint | None:
        """Return None: the owner decides where to resume."""
        return None

    def commit(self, step: int, values: dict[str, Any], used: list[str], visits: Sequence[PromptVisit] = ()) -> None:
        """Raise the error of a checkpoint that failed since the last step."""
        self.saver.collect(wait=False)

    def checkpoint(self, step: int, take: TakeSnapshot, score: float | None, metric: str | None = None) -> None:
        """Take this process's part of a snapshot and start writing it."""
        self.wait()
        self.saver.begin(step, take, score, metric)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self.saver.collect(wait=True)

    def end(self, step: int, is_complete: bool) -> None:
        """Do nothing: the owner records the end."""

    def close(self) -> None:
        """Wait until nothing is being written, then close."""
        try:
            self.wait()
        finally:
            self._devnull.close()


def read_visits(run: Path) -> list[PromptVisit]:
    """Return all visits of a run's prompts, in the order of the steps. The run may be training meanwhile."""
    directory = RunDirectory.open(run)
    steps: list[tuple[int, list[list[Any]]]] = []
    for event in _intact_events(directory.journal / "events.jsonl"):
        if event["event"] == "resumed":  # later steps were repeated
            steps = [(step, visits) for step, visits in steps if step <= event["step"]]
        elif event["event"] == "step" and event.get(PROMPTS_FIELD):
            steps.append((event["step"], event[PROMPTS_FIELD]))
    if not steps:
        raise UserError(
            f"the journal of {run} has no rewards of prompts: it must be a run of `burnish train` with a finished step"
        )
    return [PromptVisit(*values) for _, visits in steps for values in visits]


def run_status(directory: RunDirectory) -> str:
    """Return `complete`, `stopped` (by its user), `running`, or `interrupted` for a run whose process ended in another way."""
    last = None
    for event in _intact_events(directory.journal / "events.jsonl"):
        last = event["event"]
    if last in END_EVENTS:
        return str(last)
    return "interrupted" if directory.owner() is None else "running"


def _intact_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records up to the first damaged one. A run that is being written may have a torn last line."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            record = decode_record(line) if line.endswith(b"\n") else None
            if record is None:
                return
            yield record
