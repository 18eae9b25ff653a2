"""Saving while training goes on: the loop stands still for a copy, a thread does the writing.

At most one checkpoint is being written. The next one waits for it; so does the end of the run. An error of the thread
is raised in the loop, at the next step. Where the host has no room for the copy, or the run is told to wait
(`run.save=wait`), a checkpoint is written from where its tensors are, and the loop stands still.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from burnish.config.errors import UserError
from burnish.run.background import Background
from burnish.run.checkpoints import Checkpoints
from burnish.run.contents import Snapshot
from burnish.run.staging import HostCopy, Stage, free_memory, leave, wait_for_devices

LONG_S = 5.0
"""After which a wait is worth a word."""
GIB = 1 << 30


def folder_bytes(folder: Path) -> int:
    """What lies in a folder, in bytes; files may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


Take = Callable[[Stage], Snapshot]
"""Takes a snapshot: holds every tensor the way it is told to."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, and what it cost."""

    step: int
    score: float | None
    path: Path
    write_s: float


class Saving:
    """Writes the checkpoints of one run, one at a time; `note` takes a sentence for the user, `phase` what is waited for.

    A wait has no deadline of its own, since disks are of any speed: `phase` hears of it as long as more and more of the checkpoint
    is on disk, and the supervisor ends a run that nothing is heard of.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        in_background: bool,
        note: Callable[[str], None],
        phase: Callable[[str], None],
    ) -> None:
        self.checkpoints, self.in_background, self.note, self.phase = checkpoints, in_background, note, phase
        self._work: Background[Saved] = Background()
        self._step = -1

    def begin(self, step: int, take: Take, score: float | None, metric: str | None = None) -> None:
        """Take the snapshot of a step and start writing it; the one before must have been collected."""
        stage = HostCopy() if self.in_background else leave
        snapshot = take(stage)
        wait_for_devices()
        self._step = step
        self._work.start(lambda: self._write(step, snapshot, score, metric), f"checkpoint of step {step}")
        if isinstance(stage, HostCopy) and stage.is_short:
            self.in_background = False
            found = free_memory()
            free = "" if found is None else f" ({found[0] / GIB:.1f} of {found[1] / GIB:.1f} GiB are free)"
            self.note(
                f"host memory has no room for a copy of the checkpoint{free}: this one and those after it are written while the run waits"
            )
        if not self.in_background:
            self._wait()

    def collect(self, wait: bool) -> Saved | None:
        """A checkpoint that has been written since the last call, or None; its error is raised.

        With `wait` none is under way when this returns, and a wait that takes long says for what.
        """
        if self._work.is_idle or not (wait or self._work.wait(0)):
            return None
        if not self._work.wait(LONG_S):
            self.note(f"waiting for the checkpoint of step {self._step} to be written")
            self._wait()
        return self._work.pick_up()

    def _wait(self) -> None:
        """Until nothing is being written."""
        size = -1
        while not self._work.wait(LONG_S):
            found = folder_bytes(self.checkpoints.folder)
            if found != size:
                size = found
                self.phase(f"writing the checkpoint of step {self._step}, {size / GIB:.1f} GiB are on disk")

    def _write(self, step: int, snapshot: Snapshot, score: float | None, metric: str | None) -> Saved:
        started = time.perf_counter()
        try:
            path = self.checkpoints.write(step, snapshot, score, metric)
        except OSError as error:
            where = self.checkpoints.folder if error.filename is None else error.filename
            raise UserError(
                f"cannot write the checkpoint of step {step} in {where}: {error.strerror or error}; see to that and start again"
            ) from error
        return Saved(step, score, path, time.perf_counter() - started)
