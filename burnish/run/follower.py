"""A run as those processes see it that train with the one that owns it: they write their part of checkpoints, and no more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.config.schema import Run as RunConfig
from burnish.run.checkpoints import Checkpoint, Checkpoints
from burnish.run.directory import RunDirectory
from burnish.run.display import Display
from burnish.run.run import Run
from burnish.run.saving import Saving, Take
from burnish.run.visits import Visit


class Follower(Run):
    """Steps, notes and metrics go nowhere: the owner has the same. Its errors are raised here as there."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.directory = RunDirectory(path)  # without the lock, which is the owner's
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 (closed with the run)
        self.display = Display(Path(os.devnull), self._nowhere)
        self.checkpoints = Checkpoints(self.directory.checkpoints, config.keep_last, self.display.note)
        self.saving = Saving(self.checkpoints, config.save == "background", self.display.note, self.display.phase)

    def resume(self) -> Checkpoint | None:
        """The owner knows from where."""
        return None

    def commit(self, step: int, values: dict[str, Any], used: list[str], visits: Sequence[Visit] = ()) -> None:
        """A checkpoint that could not be written since the last step is an error here."""
        self.saving.collect(wait=False)

    def checkpoint(self, step: int, take: Take, score: float | None, metric: str | None = None) -> None:
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
