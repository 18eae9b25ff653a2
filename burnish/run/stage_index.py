"""The index of a run of stages: which have begun, which are done, with what they were asked and what they made.

    <root>/<name>/stages.json  stages.yaml  lock  <stage>/  <stage>/  ...

One file, replaced atomically and checksummed. A stage is written down as begun before anything of it is made, and as done
after what it made is on disk; so a folder the index does not know is a leftover, and whatever a kill leaves in between is
found again. The stage itself says that it is done (`outcome.json` in its folder), because its process may outlive nobody.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.run.checkpoint.snapshot import file_checksum
from burnish.run.durable_files import atomic_write
from burnish.run.journal import record_checksum
from burnish.run.supervisor.exit_status import OUTCOME_FILE
from burnish.run.supervisor.liveness import HEARTBEAT_FILE as HEARTBEAT

INDEX_FILE = "stages.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class StageOutcome:
    """What a stage made, and what is told of it."""

    product: str
    """A model directory or a file, relative to the folder of all stages (the base may lie elsewhere)."""
    sums: dict[str, dict[str, Any]]
    """Size and checksum of each of its files."""
    note: str = ""
    before: float | None = None
    after: float | None = None
    """Accuracy on what the stage itself holds out."""


@dataclass
class StageEntry:
    """A stage that has begun."""

    asked: dict[str, Any]
    """What decides its numbers, by dotted key."""
    seconds: float = 0.0
    """Of its lives that are over."""
    since: float | None = None
    """When its present life began, by the clock on the wall."""
    outcome: StageOutcome | None = None
    """Of one that is done."""


@dataclass
class StageIndex:
    """The stages of a folder that have begun, by name."""

    folder: Path
    entries: dict[str, StageEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> StageIndex:
        """The index of a folder; an empty one where there is none."""
        path = folder / INDEX_FILE
        if not path.exists():
            return cls(folder)
        record = _read_checksummed(path)
        if record is None or record.get("format") != FORMAT_VERSION:
            raise UserError(
                f"{path} is damaged, or of another version: restore it from a copy, or delete {folder} to start over"
            )
        return cls(folder, {name: _entry(values) for name, values in record["stages"].items()})

    def write(self) -> None:
        """Replace the file."""
        _write_checksummed(
            self.folder / INDEX_FILE,
            {"format": FORMAT_VERSION, "stages": {n: asdict(e) for n, e in self.entries.items()}},
        )

    def is_done(self, name: str) -> bool:
        """Whether a stage has an outcome."""
        return name in self.entries and self.entries[name].outcome is not None

    def begin(self, name: str, asked: dict[str, Any], now: float) -> None:
        """A life of a stage begins; what an earlier one that nobody saw end took is added up from its last sign of life."""
        entry = self.entries.setdefault(name, StageEntry(asked))
        if entry.since is not None:
            entry.seconds += max(0.0, _last_heartbeat(self.folder / name, entry.since) - entry.since)
        entry.asked, entry.since = asked, now
        self.write()

    def end(self, name: str, now: float, outcome: StageOutcome | None) -> None:
        """A life of a stage is over, with an outcome if the stage is done."""
        entry = self.entries[name]
        entry.seconds += max(0.0, now - (now if entry.since is None else entry.since))
        entry.since, entry.outcome = None, outcome
        self.write()

    def forget(self, names: list[str]) -> None:
        """Have these stages never begun."""
        self.entries = {name: entry for name, entry in self.entries.items() if name not in names}
        self.write()


def _entry(values: dict[str, Any]) -> StageEntry:
    outcome = values.pop("outcome")
    return StageEntry(**values, outcome=None if outcome is None else StageOutcome(**outcome))


def _last_heartbeat(folder: Path, otherwise: float) -> float:
    beat = folder / HEARTBEAT
    return beat.stat().st_mtime if beat.exists() else otherwise


# --- what a stage says of itself -------------------------------------------------------------------------------------------


def write_outcome(folder: Path, outcome: StageOutcome) -> None:
    """Say that the stage of a folder is done."""
    _write_checksummed(folder / OUTCOME_FILE, asdict(outcome))


def read_outcome(folder: Path) -> StageOutcome | None:
    """What the stage of a folder says it made; None where it is not done."""
    path = folder / OUTCOME_FILE
    record = _read_checksummed(path) if path.exists() else None
    return None if record is None else StageOutcome(**record)


def product_checksums(product: Path, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Size and checksum of a file, or of the files in a folder (those of `names`), by their names."""
    if product.is_file():
        return {product.name: file_checksum(product)}
    found = sorted(str(file.relative_to(product)) for file in product.rglob("*") if file.is_file())
    return {name: file_checksum(product / name) for name in (found if names is None else names)}


def product_damage(product: Path, sums: dict[str, dict[str, Any]]) -> str | None:
    """Why what a stage made cannot be used any more, or None."""
    for name, entry in sums.items():
        file = product / name if product.is_dir() else product
        if not file.is_file():
            return f"{file} is gone"
        if file_checksum(file) != entry:
            return f"{file} is not what the stage wrote"
    return None


# --- checksummed files -----------------------------------------------------------------------------------------------------


def _write_checksummed(path: Path, record: dict[str, Any]) -> None:
    plain = json.loads(json.dumps(record))
    atomic_write(path, json.dumps({**plain, "crc": record_checksum(plain)}, indent=1) + "\n")


def _read_checksummed(path: Path) -> dict[str, Any] | None:
    """The record of a file without its checksum; None where that does not fit."""
    try:
        record = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(record, dict) or record.pop("crc", None) != record_checksum(record):
        return None
    return record
