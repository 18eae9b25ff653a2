"""The journal of a run: one checksummed JSON line per event, on disk before anything acts on the event.

A line has a running index `i`, the `event`, its fields, and `crc`, the CRC-32 of the same object without `crc` in canonical
form (sorted keys, no spaces). Nothing is ever erased: a run that goes back to a checkpoint appends a `resumed` record, which
invalidates the earlier records of later steps. Large arrays are safetensors files beside the journal; a record refers to
them by name and checksum. The file grows with the run, but memory use does not.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.run.durable_files import START_OVER_HINT, append_durably, atomic_write, truncate

if TYPE_CHECKING:
    import numpy as np

RESERVED_FIELDS = ("i", "event", "crc")
ATTACHMENT_SUFFIX = ".safetensors"


def canonical_json(record: dict[str, Any]) -> str:
    """Return the canonical text of a record. It is ASCII, so that a lone surrogate in a completion survives."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def record_checksum(record: dict[str, Any]) -> int:
    """Return the CRC-32 of a record without its `crc` field."""
    return zlib.crc32(canonical_json({k: v for k, v in record.items() if k != "crc"}).encode())


def encode_record(record: dict[str, Any]) -> str:
    """Return the line of a record without its newline."""
    return canonical_json({**record, "crc": record_checksum(record)})


def decode_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the line is damaged."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("crc") != record_checksum(record):
        return None
    return record


class Journal:
    """The events of one run, in order. Opening replays them and removes a last line that a kill tore.

    `events` holds the newest checkpoint record and the events of later steps, which a resumed run can reuse. `num_events`
    counts all events.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "events.jsonl"
        self.events: list[dict[str, Any]] = []
        self.num_events = 0
        if self.path.exists():
            self._replay()

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append one record. It is on disk when this returns. Returns the record as a reader will see it."""
        return self.append_many([(event, fields)])[0]

    def append_many(self, events: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Append several records `(event, fields)` with one sync."""
        lines: list[str] = []
        for event, fields in events:
            if clash := [name for name in RESERVED_FIELDS if name in fields]:
                raise ValueError(f"journal fields {clash} are reserved; use another name")
            lines.append(encode_record({"i": self.num_events + len(lines), "event": event, **fields}))
        try:
            append_durably(self.path, "".join(line + "\n" for line in lines).encode())
        except OSError as error:
            raise UserError(
                f"cannot write the journal {self.path}: {error.strerror}; make room and start again"
            ) from error
        # Parse the text again, so that a tuple or an integer key looks the same now as after a resume.
        records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for record in records:
            self._remember(record)
        return records

    def rewind(self, step: int) -> None:
        """Record that the run resumes after `step`. Earlier records of later steps are no longer valid."""
        self.append("resumed", step=step)

    def forget(self, step: int) -> None:
        """Record that the stored work of this and later steps is invalid, because the run's settings changed."""
        self.append("forgotten", step=step)

    def attach(self, name: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Write arrays beside the journal. Returns the reference `{"file", "crc"}` to store in a record."""
        import numpy as np
        from safetensors.numpy import save

        if "/" in name or name.startswith("."):
            raise ValueError(f"attachment name {name!r} is not a plain file name")
        # safetensors writes the memory behind a strided view, not its elements, so each array must be contiguous.
        content = save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
        atomic_write(self.folder / (name + ATTACHMENT_SUFFIX), content)
        return {"file": name + ATTACHMENT_SUFFIX, "crc": zlib.crc32(content)}

    def attachment(self, reference: dict[str, Any]) -> dict[str, np.ndarray] | None:
        """Return the arrays of a reference from `attach`, or None if the file is missing or damaged."""
        from safetensors.numpy import load

        try:
            content = (self.folder / reference["file"]).read_bytes()
        except OSError:  # missing, or on a damaged part of the disk
            return None
        return load(content) if zlib.crc32(content) == reference["crc"] else None

    def drop_attachments(self, keep: Callable[[str], bool]) -> None:
        """Delete the attachments for whose names `keep` returns False."""
        for file in sorted(self.folder.glob("*" + ATTACHMENT_SUFFIX)):
            if not keep(file.name.removesuffix(ATTACHMENT_SUFFIX)):
                file.unlink()

    def _remember(self, record: dict[str, Any]) -> None:
        if record["event"] == "checkpoint":  # it was written while later steps ran
            self.events = [event for event in self.events if event.get("step", -1) > record["step"]]
        if record["event"] == "forgotten":
            self.events = [event for event in self.events if event.get("step", -1) < record["step"]]
        self.events.append(record)
        self.num_events += 1

    def _replay(self) -> None:
        """Read the intact records and remove a torn end. A damaged record before intact ones is a `UserError`."""
        length, num_bad, num_after = 0, 0, 0
        with open(self.path, "rb") as file:
            for line in file:
                record = decode_record(line) if line.endswith(b"\n") else None
                if num_bad == 0 and record is not None and record.get("i") == self.num_events:
                    self._remember(record)
                    length += len(line)
                else:
                    num_bad += 1
                    num_after += record is not None
        if num_after:
            raise UserError(
                f"{self.path}, line {self.num_events + 1}: the record is damaged or missing, and {num_after} intact ones follow it, so "
                "this is not a torn last write; restore the file from a copy, "
                f"{START_OVER_HINT}"
            )
        if num_bad:
            truncate(self.path, length)
