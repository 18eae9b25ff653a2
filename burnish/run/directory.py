"""The run directory: where everything of one run lies, who may write it, and whether a command means the same run.

    <root>/<name>/config.yaml  metrics.jsonl  journal/  samples/  checkpoints/  report.html  curves.png  log.txt

The same command again finds the same config and goes on; another config under the same name is refused with the keys
that differ, so two experiments never mix. One process at a time writes a run: the lock is the kernel's (`flock`), so
it goes with the process however that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from burnish.config.errors import UserError, nearest
from burnish.run.files import atomic_write, sweep

MAX_SHOWN_KEYS = 12
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
    "parallel.replicate",
    "parallel.shard",
    "parallel.sequence",
    "parallel.offload",
    "placement.name",
    "placement.workers",
    "placement.engines",
    "placement.cpus",
    "placement.layout",
    "placement.pools",
    "placement.roles",
    "placement.sync",
    "placement.timeout_s",
    "rollout.source.deadline_s",
)
BEFORE = ("lock", "stacks")
"""What may lie in a run's folder before its config: the supervisor keeps the stacks of a driver that hung, however early."""
_held: set[int] = set()


def may_change(key: str) -> bool:
    """Whether a run that goes on may have another value there."""
    return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


def run_name(given: str | None, recipe: str, seed: int) -> str:
    """What a run is called: as its config says, or else after its recipe and seed."""
    return given or f"{recipe}-{seed}"


def _forget_locks() -> None:
    """In a forked child: give up its copy of each lock, or an orphaned worker would keep a dead run locked."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


class RunDirectory:
    """Paths of one run; `claim` and `create` also hold its lock until `close` (or the end of a `with` block)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.journal = path / "journal"
        self.samples = path / "samples"
        self.worst_tokens = self.samples / "worst_tokens.jsonl"
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.html"
        self.curves = path / "curves.png"
        self.log = path / "log.txt"
        self._lock: int | None = None

    @classmethod
    def create(cls, root: Path, name: str, config_text: str) -> RunDirectory:
        """A run to write: a new one, or the one already there if its config says the same. Takes the lock."""
        run = cls.claim(root, name, config_text)
        try:
            run.begin(config_text)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def claim(cls, root: Path, name: str, config_text: str) -> RunDirectory:
        """The same without writing more than the lock: until `begin`, a new run vanishes when it is closed.

        So what is wrong with models and data is found while no second process can start the same run, and leaves
        nothing behind that would stand in the way of the corrected command.
        """
        if not re.fullmatch(r"[\w.+=-]+", name) or name.startswith("."):
            raise UserError(
                f"run name {name!r} cannot be a folder name: use letters, digits and _ - + = . (not first); the folder of all runs is run.directory"
            )
        run = cls(root / name)
        if run.path.exists() and not run.config.exists():
            _refuse_foreign(run.path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
        except OSError as error:
            raise UserError(f"cannot write the run directory {run.path}: {error.strerror}") from error
        try:
            if run.config.exists():
                _refuse_other_config(run, config_text)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """A run to read; takes no lock, so a run can be looked at while it trains."""
        run = cls(path)
        if not run.config.is_file():
            siblings = [c.parent.name for c in path.parent.glob("*/config.yaml")] if path.parent.is_dir() else []
            raise UserError(f"{path} is not a run: it has no config.yaml{nearest(path.name, siblings)}")
        return run

    def lock(self) -> None:
        """Become the only writer, or raise a `UserError` that names the process that is."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UserError(
                f"run {self.path} is being written by another process (pid {owner}): wait for it, stop it, or choose another run.name"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _held.add(descriptor)
        self._lock = descriptor

    def close(self) -> None:
        """Give the lock back; a run that never began goes with it. Safe to call twice."""
        if self._lock is not None and self._lock in _held:
            _held.remove(self._lock)
            if not self.config.exists() and [entry.name for entry in self.path.iterdir()] == ["lock"]:
                (self.path / "lock").unlink()
                self.path.rmdir()
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for a child that was forked but has not run yet
            os.close(self._lock)
        self._lock = None

    def begin(self, config_text: str) -> None:
        """Write the config of a new run and its folders; clear what a killed writer left in an old one."""
        try:
            atomic_write(self.config, config_text)  # of an old run: what may change has changed
            for folder in (self.path, self.journal, self.samples, self.checkpoints):
                folder.mkdir(exist_ok=True)
                sweep(folder)
        except OSError as error:
            raise UserError(f"cannot write the run directory {self.path}: {error.strerror}") from error

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_foreign(path: Path) -> None:
    """A folder that is not a run stays untouched. One that ended before its config was written holds nothing but what `BEFORE` names."""
    if not path.is_dir():
        raise UserError(f"{path} is a file, but the run wants a folder there: choose another run.name")
    foreign = sorted(e.name for e in path.iterdir() if e.name not in BEFORE and not e.name.startswith("."))
    if foreign:
        raise UserError(
            f"{path} exists and is not a run (no config.yaml, but {', '.join(foreign[:3])}): choose another run.name"
        )


def _refuse_other_config(run: RunDirectory, config_text: str) -> None:
    try:
        old = flatten(yaml.safe_load(run.config.read_text()))
    except yaml.YAMLError as error:
        raise UserError(
            f"{run.config} is not readable as YAML ({error}): restore it, or choose another run.name"
        ) from error
    new = flatten(yaml.safe_load(config_text))
    missing = object()
    differing = [k for k in sorted(old.keys() | new.keys()) if old.get(k, missing) != new.get(k, missing)]
    differing = [k for k in differing if not may_change(k)]
    if not differing:
        return
    shown = [f"  {k}: {_value(old, k)} there, {_value(new, k)} now" for k in differing[:MAX_SHOWN_KEYS]]
    if len(differing) > len(shown):
        shown.append(f"  and {len(differing) - len(shown)} more")
    raise UserError(
        f"run {run.path} exists with another config:\n"
        + "\n".join(shown)
        + f"\ngive this one another run.name, repeat the old settings to continue it, or delete {run.path} to start over"
        + f"\n(a run that goes on may change only what leaves its numbers as they are: {', '.join(MAY_CHANGE)})"
    )


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`: the dotted names people type as overrides. Lists stay values."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _value(flat: dict[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"
