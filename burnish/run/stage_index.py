"""The index of a run of several stages: which stages have begun, which are done, their settings and their products.

    <root>/<name>/stages.json  stages.yaml  lock  <stage>/  <stage>/  ...

The index is one checksummed file that is replaced atomically. A stage is recorded as begun before anything of it is
written, and as done after its product is on disk. So a folder that is not in the index is a leftover, and a kill in between
is recovered. Each stage also writes `outcome.json` in its folder when it is done, because the process that runs all
stages may have been killed by then.
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
    """The result of a finished stage."""

    product: str
    """A model directory or a file, relative to the folder of all stages. The base model may be outside of it."""
    sums: dict[str, dict[str, Any]]
    """Size and checksum of each file of the product."""
    note: str = ""
    before: float | None = None
    after: float | None = None
    """Accuracy on the stage's held-out data, before and after the stage."""


@dataclass
class StageEntry:
    """A stage that has begun."""

    asked: dict[str, Any]
    """The settings that determine its numbers, by dotted key."""
    seconds: float = 0.0
    """Duration of its finished attempts."""
    since: float | None = None
    """Wall-clock time at which the current attempt began."""
    outcome: StageOutcome | None = None
    """The result; None until the stage is done."""


@dataclass
class StageIndex:
    """The stages of a folder that have begun, by name."""

    folder: Path
    entries: dict[str, StageEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> StageIndex:
        """Read the index of a folder; empty if there is no file."""
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
        """Record the start of an attempt. An earlier attempt that was killed counts until its last heartbeat."""
        entry = self.entries.setdefault(name, StageEntry(asked))
        if entry.since is not None:
            entry.seconds += max(0.0, _last_heartbeat(self.folder / name, entry.since) - entry.since)
        entry.asked, entry.since = asked, now
        self.write()

    def end(self, name: str, now: float, outcome: StageOutcome | None) -> None:
        """Record the end of an attempt, with an outcome if the stage is done."""
        entry = self.entries[name]
        entry.seconds += max(0.0, now - (now if entry.since is None else entry.since))
        entry.since, entry.outcome = None, outcome
        self.write()

    def forget(self, names: list[str]) -> None:
        """Remove stages from the index."""
        self.entries = {name: entry for name, entry in self.entries.items() if name not in names}
        self.write()


def _entry(values: dict[str, Any]) -> StageEntry:
    outcome = values.pop("outcome")
    return StageEntry(**values, outcome=None if outcome is None else StageOutcome(**outcome))


def _last_heartbeat(folder: Path, otherwise: float) -> float:
    beat = folder / HEARTBEAT
    return beat.stat().st_mtime if beat.exists() else otherwise


def write_outcome(folder: Path, outcome: StageOutcome) -> None:
    """Record in a stage's folder that the stage is done."""
    _write_checksummed(folder / OUTCOME_FILE, asdict(outcome))


def read_outcome(folder: Path) -> StageOutcome | None:
    """Read the outcome in a stage's folder; None if the stage is not done."""
    path = folder / OUTCOME_FILE
    record = _read_checksummed(path) if path.exists() else None
    return None if record is None else StageOutcome(**record)


def product_checksums(product: Path, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return size and checksum of a file, or of the files in a folder (all, or those in `names`), by name."""
    if product.is_file():
        return {product.name: file_checksum(product)}
    found = sorted(str(file.relative_to(product)) for file in product.rglob("*") if file.is_file())
    return {name: file_checksum(product / name) for name in (found if names is None else names)}


def product_damage(product: Path, sums: dict[str, dict[str, Any]]) -> str | None:
    """Return why a stage's product is no longer usable, or None."""
    for name, entry in sums.items():
        file = product / name if product.is_dir() else product
        if not file.is_file():
            return f"{file} is gone"
        if file_checksum(file) != entry:
            return f"{file} is not what the stage wrote"
    return None


def _write_checksummed(path: Path, record: dict[str, Any]) -> None:
    plain = json.loads(json.dumps(record))
    atomic_write(path, json.dumps({**plain, "crc": record_checksum(plain)}, indent=1) + "\n")


def _read_checksummed(path: Path) -> dict[str, Any] | None:
    """Return the record of a file without its checksum; None if the file is damaged."""
    try:
        record = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(record, dict) or record.pop("crc", None) != record_checksum(record):
        return None
    return record
