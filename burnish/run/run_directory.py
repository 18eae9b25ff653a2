"""The run directory: the paths of a run, its lock, and the check that a command continues the same run.

    <root>/<name>/config.yaml  metrics.jsonl  journal/  samples/  checkpoints/  report.html  log.txt

Repeating a command finds the same config and resumes the run. Some keys may have new values then. Such a change is printed
and recorded, and the earlier config is kept as config.1.yaml, config.2.yaml and so on. Any other difference is an error
that names the keys, so that two experiments never mix. One process at a time writes a run. The lock is the kernel's
(`flock`), so it is released however the process ends.

A run that starts over moves the old run of its name to <name>.1, or the next free number, after all checks of the new run passed.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from burnish.config.errors import UserError, did_you_mean
from burnish.run.durable_files import START_OVER_HINT, FolderId, atomic_write, folder_id, remove_leftovers
from burnish.run.journal import Journal

ConfigTree = dict[str, Any]
MAX_SHOWN_KEYS = 12
"""Keys that an error about different configs lists."""
MAY_CHANGE = (
    "run.directory",
    "run.name",
    "run.save",
    "run.save_every",
    "run.keep_last",
    "run.keep_best",
    "run.best_by",
    "run.samples_every",
    "run.trackers",
    "reward.workers",
    "parallel.pipeline",
    "parallel.data",
    "parallel.context",
    "parallel.expert",
    "parallel.tensor",
    "parallel.offload",
    "placement.name",
    "placement.workers",
    "placement.engines",
    "placement.engine_tensor",
    "placement.server",
    "placement.cpus",
    "placement.layout",
    "placement.pools",
    "placement.roles",
    "placement.sync",
    "placement.timeout_s",
    "rollout.source.deadline_s",
)
"""Keys that a resumed run may change without any effect on its numbers."""
VALIDATION_KEYS = ("validation", "preference.held_out_every")
"""Keys that change what a resumed run measures, but not its training."""
LENGTH_KEYS = ("training.steps", "sft.updates", "preference.updates", "reward_model.updates")
"""Keys for the length of a run. A resumed run may be longer; its learning-rate schedules are then those of the new length."""
OPTIMIZER_SECTIONS = tuple(
    f"{section}.optimizer"
    for section in ("training", "sft", "preference", "reward_model", "algorithm.critic", "algorithm.process")
)
SCHEDULE_KEYS = tuple(
    f"{name}.{key}" for name in OPTIMIZER_SECTIONS for key in ("lr", "schedule", "warmup", "decay", "final")
)
"""Learning rates and their schedules. A new value applies from the next update."""
VALIDATION_ROWS = "data.validation"
"""The held-out rows. They may change too, except for a new model, whose tokenizer was made from their characters."""
FILES_BEFORE_CONFIG = ("lock", "stacks")
"""Entries that a run's folder may have before its config. The supervisor saves the stacks of a driver that hung before that."""
_held_locks: set[int] = set()


def _matches_key(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def may_change(key: str) -> bool:
    """Whether another value of a key leaves a run's numbers unchanged."""
    return _matches_key(key, MAY_CHANGE)


@dataclass(frozen=True)
class ConfigChange:
    """A key whose value differs from the run's previous start."""

    key: str
    old: str
    new: str

    @property
    def is_of_training(self) -> bool:
        """Whether repeated steps give other results."""
        return _matches_key(self.key, (*LENGTH_KEYS, *SCHEDULE_KEYS))

    def __str__(self) -> str:
        return f"{self.key}: {self.old} before, {self.new} from here on"


def run_name(given: str | None, recipe: str, seed: int) -> str:
    """Return the run's name: the given one, or recipe and seed."""
    return given or f"{recipe}-{seed}"


def _drop_locks_after_fork() -> None:
    """Close a forked child's copies of the locks. Otherwise an orphaned worker would keep a dead run locked."""
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_drop_locks_after_fork)


class RunDirectory:
    """The paths of one run. `claim` and `create` also hold its lock until `close` or the end of a `with` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.journal = path / "journal"
        self.samples = path / "samples"
        self.worst_tokens = self.samples / "worst_tokens.jsonl"
        self.events = self.samples / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.html"
        self.scored = path / "scored.json"
        self.tasks = path / "tasks.jsonl"
        """Only of a run that makes tasks itself (`burnish.run.task_journal`)."""
        self.log = path / "log.txt"
        self.environment_log = path / "environment_workers.log"
        self.changes: list[ConfigChange] = []
        """Keys whose values differ from the run's previous start."""
        self.is_replaced = False
        """Whether the folder holds an old run, which `begin` will move to another name."""
        self.old_run: Path | None = None
        """Where `begin` moved the old run."""
        self._lock: int | None = None

    @classmethod
    def create(
        cls,
        root: Path,
        name: str,
        config_text: str,
        complete: Callable[[ConfigTree], ConfigTree] = lambda tree: tree,
        replaced: FolderId | None = None,
    ) -> RunDirectory:
        """Open a run to write: a new one, or the existing one if its config matches. Takes the lock."""
        run = cls.claim(root, name, config_text, complete, replaced)
        try:
            run.begin(config_text)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def claim(
        cls,
        root: Path,
        name: str,
        config_text: str,
        complete: Callable[[ConfigTree], ConfigTree] = lambda tree: tree,
        replaced: FolderId | None = None,
    ) -> RunDirectory:
        """Like `create`, but write nothing except the lock. Until `begin`, closing a new run deletes it.

        So models and data are checked while no second process can start the same run, and a failed check leaves nothing
        behind. `complete` adds defaults to an old config for keys that did not exist when it was written. `replaced` is the
        folder of an old run: it stays unchanged until `begin` moves it to another name. A process that resumes the new run
        passes the same `replaced`, which by then is the id of another folder.
        """
        run = cls._named(root, name, replaced)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
        except OSError as error:
            raise UserError(f"cannot write the run directory {run.path}: {error.strerror}") from error
        try:
            run.is_replaced = run._is_old(replaced)
            run._compare(config_text, complete)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def check(
        cls, root: Path, name: str, config_text: str, complete: Callable[[ConfigTree], ConfigTree] = lambda tree: tree
    ) -> None:
        """Raise the errors of `claim` except that of the lock. Takes no lock and writes nothing."""
        cls._named(root, name)._compare(config_text, complete)

    @classmethod
    def _named(cls, root: Path, name: str, replaced: FolderId | None = None) -> RunDirectory:
        if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
            raise UserError(
                f"run name {name!r} cannot be a folder name: use letters, digits and _ - + = . (not first); the folder of all runs is run.directory"
            )
        run = cls(root / name)
        if run.path.exists() and not run.config.exists() and not run._is_old(replaced):
            _refuse_foreign_folder(run.path)
        return run

    def _compare(self, config_text: str, complete: Callable[[ConfigTree], ConfigTree]) -> None:
        """Find the changes against the existing config; raise an error for a key that may not change."""
        if self.config.exists() and not self.is_replaced:
            self.changes = _config_changes(self, config_text, complete)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open a run to read. Takes no lock, so the run may be training meanwhile."""
        run = cls(path)
        if not run.config.is_file():
            siblings = [c.parent.name for c in path.parent.glob("*/config.yaml")] if path.parent.is_dir() else []
            raise UserError(f"{path} is not a run: it has no config.yaml{did_you_mean(path.name, siblings)}")
        return run

    def owner(self) -> int | None:
        """Return the process that writes the run, by the note in its lock; None if it has ended, or has closed the run."""
        file = self.path / "lock"
        try:
            number = int(file.read_text())
            os.kill(number, 0)
            is_own = any(os.path.samestat(os.fstat(descriptor), file.stat()) for descriptor in _held_locks)
        except (OSError, ValueError):  # no lock, an empty one, or no such process
            return None
        return number if is_own or number != os.getpid() else None

    def lock(self) -> None:
        """Take the lock, or raise a `UserError` that names the process that holds it."""
        file = self.path / "lock"
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise UserError(
                    f"run {self.path} is being written by another process (pid {owner}): wait for it, stop it, or choose another run.name"
                ) from None
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                break
            os.close(descriptor)  # the folder was renamed or removed before the lock was taken
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _held_locks.add(descriptor)
        self._lock = descriptor

    def close(self) -> None:
        """Release the lock, and delete a run that never began. Safe to call twice."""
        if self._lock is not None and self._lock in _held_locks:
            if not self.config.exists() and [entry.name for entry in self.path.iterdir()] == ["lock"]:
                (self.path / "lock").unlink()
                self.path.rmdir()
            self.release()
        self._lock = None

    def release(self) -> None:
        """Release the lock and change nothing else. Safe to call twice."""
        if self._lock is not None and self._lock in _held_locks:
            _held_locks.remove(self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also unlocks for a forked child that has not run yet
            os.close(self._lock)
        self._lock = None

    def begin(self, config_text: str) -> None:
        """Write the config and the folders; delete what a killed writer left in an existing run."""
        try:
            if self.is_replaced:
                self._move_old_run()
            if self.changes:
                self._keep_config()
                if self.changes_training:
                    self.forget_rollouts()
            atomic_write(self.config, config_text)  # last, so that after a kill the changes are found again
            for folder in (self.path, self.journal, self.samples, self.checkpoints):
                folder.mkdir(exist_ok=True)
                remove_leftovers(folder)
        except OSError as error:
            where = error.filename or self.path
            moved = f" (the old run is now {self.old_run})" if self.old_run is not None else ""
            raise UserError(
                f"cannot write {where}: {error.strerror}; fix this and run the same command again{moved}"
            ) from error

    def _is_old(self, replaced: FolderId | None) -> bool:
        """Whether this folder is the one to be replaced, and holds a run."""
        is_there = self.config.exists() or self.journal.is_dir()
        return replaced is not None and is_there and folder_id(self.path) == replaced

    def _move_old_run(self) -> None:
        """Rename the old run and create an empty folder with a new lock in its place.

        The old lock moves with the renamed folder and is held until the new one is taken. A kill in between leaves the old
        run complete under its new name.
        """
        number = 1
        while (target := self.path.with_name(f"{self.name}.{number}")).exists():
            number += 1
        old = RunDirectory(target)
        os.rename(self.path, target)
        old._lock, self._lock = self._lock, None
        self.old_run, self.is_replaced = target, False
        try:
            self.path.mkdir()
            self.lock()
        finally:
            old.release()

    @property
    def changes_training(self) -> bool:
        """Whether the length of the run or its learning rates differ from its previous start."""
        return any(change.is_of_training for change in self.changes)

    def _keep_config(self) -> None:
        """Copy the earlier config to the next free name."""
        earlier = earlier_configs(self.path)
        text = self.config.read_bytes()
        if not earlier or earlier[-1].read_bytes() != text:
            number = 1 + (int(earlier[-1].name.split(".")[1]) if earlier else 0)
            atomic_write(self.path / f"config.{number}.yaml", text)

    def forget_rollouts(self) -> None:
        """Invalidate the rollouts in the journal: the policy that sampled them was trained with other settings."""
        if self.journal.is_dir():
            Journal(self.journal).forget(0)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def earlier_configs(path: Path) -> list[Path]:
    """Return the earlier configs of a run, oldest first."""
    found = [file for file in path.glob("config.*.yaml") if file.name.split(".")[1].isdigit()]
    return sorted(found, key=lambda file: int(file.name.split(".")[1]))


def _refuse_foreign_folder(path: Path) -> None:
    """Raise a `UserError` for a folder that is not a run. A run that ended before its config has only `FILES_BEFORE_CONFIG`."""
    if not path.is_dir():
        raise UserError(f"{path} is a file, but the run wants a folder there: choose another run.name")
    foreign = sorted(e.name for e in path.iterdir() if e.name not in FILES_BEFORE_CONFIG and not e.name.startswith("."))
    if "journal" in foreign and "checkpoints" in foreign:
        raise UserError(
            f"{path / 'config.yaml'} is missing, so the settings of this run are unknown: restore it from a copy"
            f"{_earlier_config_hint(path)}, {START_OVER_HINT}"
        )
    if foreign:
        raise UserError(
            f"{path} exists and is not a run (no config.yaml, but {', '.join(foreign[:3])}): choose another run.name"
        )


def _config_changes(
    run: RunDirectory, config_text: str, complete: Callable[[ConfigTree], ConfigTree]
) -> list[ConfigChange]:
    """Return the changes against the existing config; raise an error for keys that may not change."""
    old, new = flatten_keys(complete(_read_old_config(run))), flatten_keys(yaml.safe_load(config_text))
    missing = object()
    differing = [k for k in sorted(old.keys() | new.keys()) if old.get(k, missing) != new.get(k, missing)]
    is_new_model = any(not flat.get("model.path") for flat in (old, new))
    allowed = (
        *MAY_CHANGE,
        *VALIDATION_KEYS,
        *LENGTH_KEYS,
        *SCHEDULE_KEYS,
        *(() if is_new_model else (VALIDATION_ROWS,)),
    )
    refused = [k for k in differing if not _matches_key(k, allowed)]
    if refused:
        shown = [f"  {k}: {_shown_value(old, k)} there, {_shown_value(new, k)} now" for k in refused[:MAX_SHOWN_KEYS]]
        if len(refused) > len(shown):
            shown.append(f"  and {len(refused) - len(shown)} more")
        raise UserError(
            f"run {run.path} exists with another config:\n"
            + "\n".join(shown)
            + "\ngive this one another run.name, repeat the old settings to continue it, "
            f"{START_OVER_HINT}\n"
            "(a run that goes on may have more steps, another learning rate and schedule, other validation, trackers, saving and "
            "placement; another model, data, seed or algorithm would make its first steps part of another experiment)"
        )
    _refuse_fewer_steps(run, new, differing)
    return [ConfigChange(k, _shown_value(old, k), _shown_value(new, k)) for k in differing]


def _read_old_config(run: RunDirectory) -> ConfigTree:
    try:
        found = yaml.safe_load(run.config.read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no keys")
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are not UTF-8, too
        raise UserError(
            f"{run.config} is damaged ({' '.join(str(error).split())}): restore it from a copy{_earlier_config_hint(run.path)}, {START_OVER_HINT}"
        ) from error
    return found


def _earlier_config_hint(path: Path) -> str:
    earlier = earlier_configs(path)
    return f" ({earlier[-1]} is the one before the last change)" if earlier else ""


def _refuse_fewer_steps(run: RunDirectory, new: dict[str, Any], differing: list[str]) -> None:
    """Raise a `UserError` if the new number of steps or updates is smaller than the number already done."""
    made = max((int(p.name.removeprefix("step-")) for p in run.checkpoints.glob("step-*") if p.is_dir()), default=0)
    for key in LENGTH_KEYS:
        if key in differing and isinstance(new.get(key), int) and new[key] < made:
            raise UserError(
                f"{key}={new[key]}, but run {run.path} has made {made}: give {made} or more, or another run.name for a shorter one"
            )


def flatten_keys(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": 1}`, the dotted keys of overrides. Lists stay values."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten_keys(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _shown_value(flat: dict[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"
