"""What a checkpoint holds, as data: taken in a moment, written later, by whoever has the time.

Saving has two phases. A snapshot says which files there will be and holds what goes into them, out of reach of the
training that goes on (`staging.py`); it writes nothing. Writing then needs nothing but the snapshot and a folder, so a
thread can do it. Sizes and checksums are those of what was meant to be written: they also catch a disk that wrote
something else.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from burnish.config.errors import UserError

CHUNK = 1 << 22
Sums = dict[str, dict[str, Any]]
"""Size and CRC-32 of each file, by its name in the folder."""


class Content(Protocol):
    """One or more files to be."""

    def write(self, folder: Path) -> Sums:
        """Make the files in a folder, on disk when this returns."""
        ...


@dataclass(frozen=True)
class Part:
    """Which of how many processes that save together."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint to be: what makes the model, and what it takes besides to go on training."""

    model: Sequence[Content]
    state: Sequence[Content] = ()
    part: Part = Part()
    """Of a model that is spread over processes, this process's part."""

    def write(self, folder: Path) -> Sums:
        """All files; each is marked with what it is `of`."""
        sums: Sums = {}
        for of, contents in (("model", self.model), ("state", self.state)):
            for name, entry in write_contents(folder, contents).items():
                sums[name] = {**entry, "of": of}
        return sums


@dataclass(frozen=True)
class Blob:
    """A file whose bytes are known."""

    name: str
    data: bytes | str
    if_absent: bool = False
    """Only where no other content has made a file of this name."""

    def write(self, folder: Path) -> Sums:
        if self.if_absent and (folder / self.name).exists():
            return {}
        return write_file(folder, self.name, [self.data.encode() if isinstance(self.data, str) else self.data])


def write_contents(folder: Path, contents: Iterable[Content]) -> Sums:
    """Make the files of several contents."""
    sums: Sums = {}
    for content in contents:
        sums |= content.write(folder)
    return sums


def file_sums(path: Path) -> dict[str, Any]:
    """Size and CRC-32 of a file, read in pieces."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"size": size, "crc32": crc}


def folder_sums(folder: Path) -> Sums:
    """Sizes and checksums of the files of a folder; none where there is no folder."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {file.name: file_sums(file) for file in files if file.is_file()}


def are_sums(found: Any) -> bool:
    """Whether what was read from a file are `Sums`: a size and a CRC-32 of each file. What is not is a damaged record."""
    return isinstance(found, dict) and all(
        isinstance(entry, dict) and all(type(entry.get(key)) is int for key in ("size", "crc32"))
        for entry in found.values()
    )


def what_is_damaged(folder: Path, sums: Sums, contents: bool = True) -> str | None:
    """Which file of a folder is not what was written, or None. Without `contents` only names and sizes are compared."""
    for name, entry in sums.items():
        file = folder / name
        found = {"size": file.stat().st_size} if file.is_file() else None
        if contents and found is not None and found["size"] == entry["size"]:
            found = file_sums(file)
        if (difference := _difference(name, found, entry)) is not None:
            return difference
    return None


def what_differs(found: Sums, sums: Sums) -> str | None:
    """Which of the files in `sums` is missing in `found` or has another size or checksum there, or None."""
    differences = (_difference(name, found.get(name), entry) for name, entry in sums.items())
    return next((difference for difference in differences if difference is not None), None)


def _difference(name: str, found: dict[str, Any] | None, entry: dict[str, Any]) -> str | None:
    if found is None:
        return f"{name} is missing"
    if found["size"] != entry["size"]:
        return f"{name} has {found['size']} bytes instead of {entry['size']}"
    if found.get("crc32", entry["crc32"]) != entry["crc32"]:
        return f"{name} has another checksum than when it was written"
    return None


def write_file(folder: Path, name: str, chunks: Iterable[bytes | memoryview]) -> Sums:
    """A file made of chunks, on disk when this returns; while it works other threads can run.

    What the system refuses (a full disk, a quota) is an error that names the file.
    """
    path, size, crc = folder / name, 0, 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            for chunk in chunks:
                rest = memoryview(chunk).cast("B")
                crc, size = zlib.crc32(rest, crc), size + len(rest)
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; make room and start again") from error
    return {name: {"size": size, "crc32": crc}}
