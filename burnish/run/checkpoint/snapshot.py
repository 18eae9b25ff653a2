"""The contents of a checkpoint: snapshots, checksums, and one folder written by several processes.

Saving has two phases. Taking a snapshot copies the values of all files out of the training's reach (`saver.py`) and writes
nothing. Writing then needs only the snapshot and a folder, so a thread can do it. Sizes and checksums are computed from the
values in memory, so they also detect a disk that wrote something else.

Several processes that save one folder meet in the file system only, so that saving never interferes with the collectives of
training. Each process writes its files, then a list of them with sizes and checksums, or the reason why it failed. Process 0
waits for all lists, with a deadline. The folder has a temporary name until it is complete, so that a killed run leaves only
what `remove_leftovers` deletes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from burnish.config.errors import UserError
from burnish.run.durable_files import TEMPORARY_PREFIX, atomic_write, commit_directory

if TYPE_CHECKING:
    from torch.nn import Module

Checksums = dict[str, dict[str, Any]]
"""Size and CRC-32 of each file, by its name in the folder."""
READ_CHUNK_BYTES = 1 << 22
PART_LISTS = "part-*.json"
PARTS_DEADLINE_S = 1800.0
PARTS_POLL_S = 0.05


class Content(Protocol):
    """One or more files that a snapshot will write."""

    def write(self, folder: Path) -> Checksums:
        """Write the files to a folder. They are on disk when this returns."""
        ...


@dataclass(frozen=True)
class WriterRank:
    """The index of this process, and the number of processes that save together."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint: the files of the model, and the training state that a resumed run needs besides."""

    model: Sequence[Content]
    state: Sequence[Content] = ()
    part: WriterRank = WriterRank()
    """The process that holds this snapshot, if a model is sharded over several."""

    def write(self, folder: Path) -> Checksums:
        """Write all files. Each entry says whether the file is `of` the model or the state."""
        sums: Checksums = {}
        for of, contents in (("model", self.model), ("state", self.state)):
            for name, entry in write_contents(folder, contents).items():
                sums[name] = {**entry, "of": of}
        return sums


@dataclass(frozen=True)
class BytesFile:
    """A file with the given bytes."""

    name: str
    data: bytes | str
    if_absent: bool = False
    """Write only if no other content wrote a file of this name."""

    def write(self, folder: Path) -> Checksums:
        if self.if_absent and (folder / self.name).exists():
            return {}
        return write_file(folder, self.name, [self.data.encode() if isinstance(self.data, str) else self.data])


def write_contents(folder: Path, contents: Iterable[Content]) -> Checksums:
    """Write the files of several contents."""
    sums: Checksums = {}
    for content in contents:
        sums |= content.write(folder)
    return sums


def file_checksum(path: Path) -> dict[str, Any]:
    """Return size and CRC-32 of a file, read in chunks."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"size": size, "crc32": crc}


def folder_checksums(folder: Path) -> Checksums:
    """Return sizes and checksums of the files in a folder; {} if there is no folder."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {file.name: file_checksum(file) for file in files if file.is_file()}


def are_checksums(found: Any) -> bool:
    """Whether a parsed value has the form of `Checksums`. If not, the record it was read from is damaged."""
    return isinstance(found, dict) and all(
        isinstance(entry, dict) and all(type(entry.get(key)) is int for key in ("size", "crc32"))
        for entry in found.values()
    )


def first_damaged_file(folder: Path, sums: Checksums, contents: bool = True) -> str | None:
    """Return what is wrong with the first damaged file of a folder, or None. Without `contents`, compare only names and sizes."""
    for name, entry in sums.items():
        file = folder / name
        found = {"size": file.stat().st_size} if file.is_file() else None
        if contents and found is not None and found["size"] == entry["size"]:
            found = file_checksum(file)
        if (difference := _difference(name, found, entry)) is not None:
            return difference
    return None


def first_difference(found: Checksums, sums: Checksums) -> str | None:
    """Return the first difference between the files in `sums` and those in `found`, or None."""
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


def write_file(folder: Path, name: str, chunks: Iterable[bytes | memoryview]) -> Checksums:
    """Write a file from chunks. It is on disk when this returns, and other threads can run meanwhile.

    A full disk or an exceeded quota is a `UserError` that names the file.
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


def write_part(path: Path, snapshot: Snapshot) -> None:
    """Write this process's files of the folder `path`, and tell process 0 what was written or why it failed."""
    folder = parts_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sums = snapshot.write(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk may refuse this too; process 0 then waits until its deadline
            _write_part_list(folder, snapshot.part, {"error": f"{type(error).__name__}: {error}"})
        raise
    _write_part_list(folder, snapshot.part, {"files": sums})


@contextmanager
def assembled_folder(path: Path, part: WriterRank) -> Iterator[tuple[Path, Checksums]]:
    """Wait in process 0 for all parts; yield the folder with all files, which becomes `path` when the block ends."""
    folder = parts_folder(path)
    sums = _wait_for_parts(folder, part)
    for file in folder.glob(PART_LISTS):
        file.unlink()
    yield folder, sums
    commit_directory(folder, path)


def writer_rank_of(model: Module) -> WriterRank:
    """Return the rank of this process among those that hold a model. It is the only one unless the model is divided among several."""
    from burnish.core.pipeline_stage import stage_of
    from burnish.core.sharded_tensors import is_dtensor

    if stage_of(model) is None and not any(is_dtensor(parameter) for parameter in model.parameters()):
        return WriterRank()
    from torch import distributed

    return WriterRank(distributed.get_rank(), distributed.get_world_size())


def parts_folder(path: Path) -> Path:
    """Return the temporary folder of all parts. Every process computes the same name."""
    return path.with_name(f"{TEMPORARY_PREFIX}parts-{path.name}")


def _write_part_list(folder: Path, part: WriterRank, message: dict[str, Any]) -> None:
    """Tell process 0 that a part is complete. It syncs and renames the folder at once, so the folder may be gone afterwards."""
    atomic_write(folder / f"part-{part.index:05d}.json", json.dumps(message), syncs_folder=False)


def _wait_for_parts(folder: Path, part: WriterRank) -> Checksums:
    until = time.monotonic() + PARTS_DEADLINE_S
    waiting = set(range(part.count))
    sums: Checksums = {}
    while waiting:
        for rank in sorted(waiting):
            file = folder / f"part-{rank:05d}.json"
            if not file.exists():
                continue
            message = json.loads(file.read_text())
            if "error" in message:
                raise UserError(
                    f"process {rank} of {part.count} could not write its part of {folder}: {message['error']}"
                )
            sums |= message["files"]
            waiting.discard(rank)
        if waiting and time.monotonic() > until:
            raise UserError(
                f"{folder}: processes {sorted(waiting)} of {part.count} have not written their parts after {PARTS_DEADLINE_S:.0f} s; "
                "are they alive, and do they see the same folder?"
            )
        if waiting:
            time.sleep(PARTS_POLL_S)
    return sums
