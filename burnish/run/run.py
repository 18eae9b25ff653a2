"""A run as its trainer sees it: commit steps, save checkpoints, go on where it was.

The order of writes is what makes a kill harmless: a step's metrics and journal records are on disk before the next
step starts, a checkpoint is whole or absent, and `resume` takes everything back to the newest checkpoint, so that the
steps after it are made again, identically.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.config.schema import Run as RunConfig
from burnish.run.checkpoints import Checkpoint, Checkpoints
from burnish.run.directory import RunDirectory
from burnish.run.display import Display
from burnish.run.journal import Journal
from burnish.run.metrics import Metrics
from burnish.run.samples import write_samples
from burnish.run.trackers import make_trackers
from burnish.run.worst_tokens import WorstTokens


class Run:
    """Everything a run writes. Use it in a `with` block."""

    def __init__(self, directory: RunDirectory, config: RunConfig, resolved: dict[str, Any]) -> None:
        self.directory = directory
        self.display = Display(directory.log)
        self.journal = Journal(directory.journal)
        self.metrics = Metrics(directory.metrics)
        self.worst_tokens = WorstTokens(directory.worst_tokens)
        self.checkpoints = Checkpoints(directory.checkpoints, config.keep_last, self.display.note)
        self.trackers = make_trackers(config.trackers, directory.path, resolved, self.display.note)

    def resume(self) -> Checkpoint | None:
        """The checkpoint to go on from, with metrics, worst tokens and journal taken back to it; None for a fresh start."""
        latest = self.checkpoints.latest()
        if latest is None and self.journal.num_events == 0:
            return None
        step = -1 if latest is None else latest.step
        self.metrics.truncate_after(step)
        self.worst_tokens.truncate_after(step)
        self.journal.rewind(step)
        return latest

    def commit(self, step: int, values: dict[str, Any], used: list[str]) -> None:
        """One step is done: its metrics, and which trajectories its loss used."""
        self.metrics.append(step, values)
        self.journal.append_many([("used", {"step": step, "ids": used}), ("step", {"step": step})])
        for tracker in self.trackers:
            tracker.log(step, values)
        self.display.step(step, values)

    def samples(self, step: int, kind: str, rows: list[dict[str, Any]]) -> None:
        """A table of samples."""
        write_samples(self.directory.samples, step, kind, rows)

    def checkpoint(self, step: int, writer: Callable[[Path], None], score: float | None) -> Path:
        """A checkpoint; what the journal kept to redo the steps before it is no longer needed."""
        self.worst_tokens.sync()
        path = self.checkpoints.write(step, writer, score)
        self.journal.append("checkpoint", step=step, path=path.name, score=score)
        self.journal.drop_attachments(lambda name: int(name.split("-")[1]) > step)
        return path

    def close(self) -> None:
        """Give back the terminal, the trackers and the lock."""
        self.display.stop()
        for tracker in self.trackers:
            tracker.close()
        self.directory.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
