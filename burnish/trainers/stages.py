"""`Stages` runs several commands in a row as one run. It records which stages are done, and checks their inputs and changed settings.

    with Stages.open(folder, plan, recipe_text, start_from) as stages:
        for stage in stages.left():
            stages.begin(stage)
            ...                        # the stage's command, in this process or in its own
            if not stages.end(stage):
                break                  # it was stopped or failed; the same command resumes here

Rule for a changed recipe: a stage that has not begun may change freely. A stage that has begun is repeated, with all later stages, only
on request (`--from STAGE`); otherwise the change is refused with the keys that differ. A stage counts as changed if a stage that it needs
has changed. Nothing is deleted without `--from`, but for the optimizer's state of stages that are done.

This module imports no torch: the parent process of the stages imports it and forks for each stage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from burnish.config.errors import UserError, unknown_name_error
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.durable_files import atomic_write, remove, remove_leftovers
from burnish.run.run_directory import RunDirectory
from burnish.run.stage_index import INDEX_FILE, StageIndex, product_damage, read_outcome
from burnish.run.supervisor.exit_status import OUTCOME_FILE

RECIPE_FILE = "stages.yaml"
MAX_SHOWN_KEYS = 8
"""Changed keys that an error message lists."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage whose command, settings and needs are checked. The products that it needs may not exist yet."""

    name: str
    command: str
    start: str | None
    """The stage whose model it starts from, or `base`; None without a start model."""
    needs: tuple[str, ...]
    """Stages whose products it reads."""
    asked: dict[str, Any]
    """The settings that decide its results, by dotted key. Products appear by name, not by path."""
    of: str | None = None
    """For a measurement: the stage whose model is measured."""


class Stages:
    """The stages of one folder, which is locked. Each stage has a subfolder of its name."""

    def __init__(self, folder: Path, plan: Sequence[PlannedStage], index: StageIndex, lock: RunDirectory) -> None:
        self.folder, self.plan, self.index, self._lock = folder, list(plan), index, lock

    @classmethod
    def open(cls, folder: Path, plan: Sequence[PlannedStage], recipe: str, start_from: str | None = None) -> Stages:
        """Open a new run of stages, or resume the existing one if the plan allows it. Takes the lock."""
        _check_folder(folder)
        lock = RunDirectory(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.lock()
        except OSError as error:
            raise UserError(f"cannot write the folder of the stages {folder}: {error.strerror}") from error
        try:
            stages = cls(folder, plan, StageIndex.read(folder), lock)
            stages._record_finished()
            for name, entry in stages.index.entries.items():
                if entry.outcome is not None:
                    stages._delete_training_state(name)
            if start_from is not None:
                stages._check_changes(before=start_from)
                stages._forget(start_from)
            else:
                stages._check_changes()
            remove_leftovers(folder)
            stages.index.write()  # written first: it marks the folder as one of stages
            atomic_write(folder / RECIPE_FILE, recipe)
        except BaseException:
            lock.close()
            raise
        return stages

    def left(self) -> list[PlannedStage]:
        """The stages that are not done, in order."""
        return [stage for stage in self.plan if not self.index.is_done(stage.name)]

    def begin(self, stage: PlannedStage) -> None:
        """Record that a stage begins. Raises if a product that it needs is missing or damaged."""
        for name in stage.needs:
            self._check_product(name, stage.name)
        folder = self.folder / stage.name
        if stage.name not in self.index.entries and folder.exists():
            remove(folder)  # `--from` reset this stage and was killed before it removed the folder
        self.index.begin(stage.name, stage.asked, time.time())

    def end(self, stage: PlannedStage) -> bool:
        """Record how a stage ended. Returns whether it is done."""
        outcome = read_outcome(self.folder / stage.name)
        self.index.end(stage.name, time.time(), outcome)
        if outcome is not None:
            self._delete_training_state(stage.name)
        return outcome is not None

    def made(self) -> dict[str, str]:
        """Return what the references `stage:NAME` and `run:NAME` of a recipe stand for: products and run folders of finished stages."""
        found = {}
        for name, entry in self.index.entries.items():
            if entry.outcome is not None:
                found[f"stage:{name}"] = str(self.folder / entry.outcome.product)
                found[f"run:{name}"] = str(self.folder / name)
        return found

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record_finished(self) -> None:
        """Record stages whose command finished after the parent process was killed."""
        for name, entry in self.index.entries.items():
            if entry.outcome is None and (outcome := read_outcome(self.folder / name)) is not None:
                done = (self.folder / name / OUTCOME_FILE).stat().st_mtime
                self.index.end(name, done if entry.since is not None else time.time(), outcome)

    def _delete_training_state(self, name: str) -> None:
        """Delete what a finished stage, which is never resumed, needs no more. Other stages read its model."""
        Checkpoints(RunDirectory(self.folder / name).checkpoints, keep_last=1).delete_training_state()

    def _check_changes(self, before: str | None = None) -> None:
        """Refuse changed settings of stages that have begun. With `before`, only stages before that one are checked."""
        changed: set[str] = set()
        for stage in self.plan:
            if stage.name == before:
                return
            entry = self.index.entries.get(stage.name)
            if entry is None:
                changed.add(stage.name)
                continue
            keys = sorted(k for k in entry.asked.keys() | stage.asked.keys() if not _same(entry.asked, stage.asked, k))
            new = [name for name in stage.needs if name in changed]
            if keys or new:
                raise UserError(self._refusal(stage, entry.asked, keys, new))

    def _refusal(self, stage: PlannedStage, then: dict[str, Any], keys: list[str], new: list[str]) -> str:
        lines = [f"  {k}: {_value(then, k)} there, {_value(stage.asked, k)} now" for k in keys[:MAX_SHOWN_KEYS]]
        lines += [f"  and {len(keys) - MAX_SHOWN_KEYS} more"] if len(keys) > MAX_SHOWN_KEYS else []
        lines += [f"  it needs stage {name}, which is new" for name in new]
        own = stage.of or stage.name
        return "\n".join(
            [
                f"stage {stage.name} of {self.folder} has begun with other settings:",
                *lines,
                f"repeat the old settings to go on, make it again with all stages after it (--from {own}, which deletes their "
                "folders), or give this recipe another run.name",
            ]
        )

    def _forget(self, start_from: str) -> None:
        """Reset a stage and all later ones. The index is written first, so that after a kill a folder without an entry is removed."""
        names = [stage.name for stage in self.plan]
        if start_from not in names:
            raise unknown_name_error("stage", start_from, names)
        for name in names[: names.index(start_from)]:
            if not self.index.is_done(name):
                raise UserError(f"--from {start_from}: stage {name} before it is not done; leave --from out to go on")
        kept = names[: names.index(start_from)]
        later = [
            name for name in dict.fromkeys([*self.index.entries, *names]) if name not in kept
        ]  # includes stages that the recipe no longer has
        self.index.forget(later)
        for name in later:
            if (self.folder / name).exists():
                remove(self.folder / name)

    def _check_product(self, name: str, user: str) -> None:
        entry = self.index.entries.get(name)
        if entry is None or entry.outcome is None:
            raise UserError(f"stage {user} needs stage {name}, which is not done: start it with --from {name}")
        reason = product_damage(self.folder / entry.outcome.product, entry.outcome.sums)
        if reason is not None:
            raise UserError(
                f"stage {user} needs what stage {name} made, and {reason}: make it again with --from {name}"
            )


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, but the stages want a folder there: choose another run.name")
    foreign = sorted(
        e.name for e in folder.iterdir() if e.name not in ("lock", INDEX_FILE) and not e.name.startswith(".")
    )
    if foreign and not (folder / INDEX_FILE).exists():
        raise UserError(f"{folder} exists and holds no stages (but {', '.join(foreign[:3])}): choose another run.name")


def _same(then: dict[str, Any], now: dict[str, Any], key: str) -> bool:
    missing = object()
    return bool(then.get(key, missing) == now.get(key, missing))


def _value(flat: dict[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"
