"""A run as its trainer sees it: commit steps, save checkpoints, go on where it was.

The order of writes is what makes a kill harmless: a step's metrics and journal records are on disk before the next
step starts, a checkpoint is whole or absent, and `resume` takes everything back to the newest checkpoint, so that the
steps after it are made again, identically. A checkpoint is written while the next steps are made; the journal hears of
it when it is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
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
from burnish.run.metrics import MetricsFile, make_trackers
from burnish.run.run_directory import RunDirectory, earlier_configs
from burnish.run.samples import WorstTokensFile, write_samples
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, Heartbeat, HeartbeatDisplay, process_seconds

# --- What a run's journal knows of its prompts: how every visit of each was rewarded, whether its samples were kept or not.
#
# The record of a step has a short list for each prompt it drew, so the whole history of a long run stays readable when the
# samples themselves are gone.

PROMPTS_FIELD = "prompts"


@dataclass(frozen=True)
class PromptVisit:
    """One visit of a prompt: how many of its samples were scored and judged, and how well."""

    prompt_id: str
    visit: int
    scored: int
    reward: float
    """The sum of the rewards of those that were scored."""
    judged: int
    right: float
    """Right answers among those that were judged, in shares where an accuracy is one."""

    def values(self) -> list[Any]:
        """As the journal holds it."""
        return [self.prompt_id, self.visit, self.scored, self.reward, self.judged, self.right]


def read_visits(run: Path) -> list[PromptVisit]:
    """Every visit that still counts, in the order of the steps; a run may be read while it trains."""
    directory = RunDirectory.open(run)
    steps: list[tuple[int, list[list[Any]]]] = []
    for event in _intact_events(directory.journal / "events.jsonl"):
        if event["event"] == "resumed":
            steps = [(step, found) for step, found in steps if step <= event["step"]]
        elif event["event"] == "step" and event.get(PROMPTS_FIELD):
            steps.append((event["step"], event[PROMPTS_FIELD]))
    if not steps:
        raise UserError(
            f"the journal of {run} has no rewards of prompts: it must be a run of `burnish train` with a finished step"
        )
    return [PromptVisit(*values) for _, found in steps for values in found]


def _intact_events(path: Path) -> Iterator[dict[str, Any]]:
    """The intact records up to the first that is not: a run that is being written may have a torn last line."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            record = decode_record(line) if line.endswith(b"\n") else None
            if record is None:
                return
            yield record


class Run:
    """Everything a run writes. Use it in a `with` block."""

    def __init__(self, directory: RunDirectory, config: RunConfig, resolved: dict[str, Any]) -> None:
        self.directory = directory
        self.heartbeat = Heartbeat(directory.path / HEARTBEAT_FILE)
        self.display: Display = HeartbeatDisplay(directory.log, self.heartbeat)
        self.journal = Journal(directory.journal)
        self.metrics = MetricsFile(directory.metrics)
        self.worst_tokens = WorstTokensFile(directory.worst_tokens)
        self.checkpoints = Checkpoints(directory.checkpoints, config.keep_last, self.display.note)
        self.saving = CheckpointSaver(
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
        self.trackers = make_trackers(config.trackers, directory.path, resolved, self.display.note)
        self.last_step = 0
        """The last committed step; after `resume`, the step of the checkpoint that the run continues from."""
        self.saved_step = 0
        """The step of the newest checkpoint, written or being written."""
        self._cost: dict[str, float] = {}  # of saving, since the last step's metrics

    def resume(self) -> Checkpoint | None:
        """The checkpoint to go on from, with metrics, worst tokens and journal taken back to it; None for a fresh start."""
        latest = self.checkpoints.latest()
        step = -1 if latest is None else latest.step
        self.last_step = self.saved_step = max(step, 0)
        # Also where the journal has no record: a kill may have come after the line of step 0 and before its record.
        for remark in self.metrics.truncate_after(step):
            self.display.note(remark)
        self.worst_tokens.truncate_after(step)
        if latest is None and self.journal.num_events == 0:
            return None
        self.journal.rewind(step)
        return latest

    def commit(self, step: int, values: dict[str, Any], used: list[str], visits: Sequence[PromptVisit] = ()) -> None:
        """One step is done: its metrics, which trajectories its loss used, and how the prompts it drew were answered.

        A checkpoint that could not be written since the last step is an error here.
        """
        self._record(wait=False)
        values, self._cost = values | self._cost | {"time/elapsed_s": process_seconds()}, {}
        self.metrics.append(step, values)
        prompts = {PROMPTS_FIELD: [visit.values() for visit in visits]} if visits else {}
        self.journal.append_many([("used", {"step": step, "ids": used}), ("step", {"step": step, **prompts})])
        self.last_step = step
        for tracker in self.trackers:
            tracker.log(step, values)
        self.display.step(step, values)

    def samples(self, step: int, kind: str, rows: list[dict[str, Any]]) -> None:
        """A table of samples."""
        write_samples(self.directory.samples, step, kind, rows)

    def checkpoint(self, step: int, take: TakeSnapshot, score: float | None, metric: str | None = None) -> None:
        """Take a snapshot and have it written, with its score and the name of the metric that the score is a value of.

        The journal records the checkpoint once it is on disk: in `wait`, or when a later step is committed.
        """
        started = time.perf_counter()
        self.worst_tokens.sync()
        self.wait()
        self.saving.begin(step, take, score, metric)
        self.saved_step = step
        if not self.saving.in_background:
            self.wait()
        self._cost["time/checkpoint_blocked_s"] = time.perf_counter() - started

    def wait(self) -> None:
        """Return when no checkpoint is being written any more."""
        self._record(wait=True)

    def _record(self, wait: bool) -> None:
        """What a finished checkpoint leaves in the journal; what that kept to redo the steps before it is not needed now."""
        saved = self.saving.collect(wait)
        if saved is None:
            return
        self._cost["time/checkpoint_write_s"] = saved.write_s
        self.journal.append("checkpoint", step=saved.step, path=saved.path.name, score=saved.score)
        self.journal.drop_attachments(lambda name: int(name.split("-")[1]) > saved.step)

    def end(self, step: int, is_complete: bool) -> None:
        """Record that the run is complete, or was stopped by its user: without it the supervisor takes no exit for a success."""
        self.wait()
        self.journal.append("complete" if is_complete else "stopped", step=step)

    def close(self) -> None:
        """Wait for a checkpoint that is being written; give back the terminal, the trackers and the lock."""
        try:
            self.wait()
        finally:
            self.display.stop()
            for tracker in self.trackers:
                tracker.close()
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
        except Exception as other:  # noqa: BLE001 -- the error that ended the run must not be hidden by a second one
            self.display.note(f"{type(other).__name__}: {other}")
        finally:
            self.close()


# --- A run as those processes see it that train with the one that owns it: they write their part of checkpoints, and no more.


class FollowerRun(Run):
    """Steps, notes and metrics go nowhere: the owner has the same. Its errors are raised here as there."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.directory = RunDirectory(path)  # without the lock, which is the owner's
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 (closed with the run)
        self.display = Display(Path(os.devnull), self._nowhere)
        self.checkpoints = Checkpoints(self.directory.checkpoints, config.keep_last, self.display.note)
        self.saving = CheckpointSaver(
            self.checkpoints, config.save == "background", self.display.note, self.display.phase
        )

    def resume(self) -> Checkpoint | None:
        """The owner knows from where."""
        return None

    def commit(self, step: int, values: dict[str, Any], used: list[str], visits: Sequence[PromptVisit] = ()) -> None:
        """A checkpoint that could not be written since the last step is an error here."""
        self.saving.collect(wait=False)

    def checkpoint(self, step: int, take: TakeSnapshot, score: float | None, metric: str | None = None) -> None:
        """Take this process's part of a snapshot and have it written."""
        self.wait()
        self.saving.begin(step, take, score, metric)

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        self.saving.collect(wait=True)

    def end(self, step: int, is_complete: bool) -> None:
        """The owner records it."""

    def close(self) -> None:
        """Wait for what is being written."""
        try:
            self.wait()
        finally:
            self._nowhere.close()
