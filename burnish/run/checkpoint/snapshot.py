"""What a checkpoint holds, as data: taken in a moment, written later, by whoever has the time.

Saving has two phases. A snapshot says which files there will be and holds what goes into them, out of reach of the
training that goes on (`staging.py`); it writes nothing. Writing then needs nothing but the snapshot and a folder, so a
thread can do it. Sizes and checksums are those of what was meant to be written: they also catch a disk that wrote
something else.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.run.durable_files import TEMPORARY_PREFIX, atomic_write, commit_directory

READ_CHUNK_BYTES = 1 << 22
Checksums = dict[str, dict[str, Any]]
"""Size and CRC-32 of each file, by its name in the folder."""


class Content(Protocol):
    """One or more files to be."""

    def write(self, folder: Path) -> Checksums:
        """Make the files in a folder, on disk when this returns."""
        ...


@dataclass(frozen=True)
class WriterRank:
    """Which of how many processes that save together."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint to be: what makes the model, and what it takes besides to go on training."""

    model: Sequence[Content]
    state: Sequence[Content] = ()
    part: WriterRank = WriterRank()
    """Of a model that is spread over processes, this process's part."""

    def write(self, folder: Path) -> Checksums:
        """All files; each is marked with what it is `of`."""
        sums: Checksums = {}
        for of, contents in (("model", self.model), ("state", self.state)):
            for name, entry in write_contents(folder, contents).items():
                sums[name] = {**entry, "of": of}
        return sums


@dataclass(frozen=True)
class BytesFile:
    """A file whose bytes are known."""

    name: str
    data: bytes | str
    if_absent: bool = False
    """Only where no other content has made a file of this name."""

    def write(self, folder: Path) -> Checksums:
        if self.if_absent and (folder / self.name).exists():
            return {}
        return write_file(folder, self.name, [self.data.encode() if isinstance(self.data, str) else self.data])


def write_contents(folder: Path, contents: Iterable[Content]) -> Checksums:
    """Make the files of several contents."""
    sums: Checksums = {}
    for content in contents:
        sums |= content.write(folder)
    return sums


def file_checksum(path: Path) -> dict[str, Any]:
    """Size and CRC-32 of a file, read in pieces."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"size": size, "crc32": crc}


def folder_checksums(folder: Path) -> Checksums:
    """Sizes and checksums of the files of a folder; none where there is no folder."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {file.name: file_checksum(file) for file in files if file.is_file()}


def are_checksums(found: Any) -> bool:
    """Whether what was read from a file are `Sums`: a size and a CRC-32 of each file. What is not is a damaged record."""
    return isinstance(found, dict) and all(
        isinstance(entry, dict) and all(type(entry.get(key)) is int for key in ("size", "crc32"))
        for entry in found.values()
    )


def first_damaged_file(folder: Path, sums: Checksums, contents: bool = True) -> str | None:
    """Which file of a folder is not what was written, or None. Without `contents` only names and sizes are compared."""
    for name, entry in sums.items():
        file = folder / name
        found = {"size": file.stat().st_size} if file.is_file() else None
        if contents and found is not None and found["size"] == entry["size"]:
            found = file_checksum(file)
        if (difference := _difference(name, found, entry)) is not None:
            return difference
    return None


def first_difference(found: Checksums, sums: Checksums) -> str | None:
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


def write_file(folder: Path, name: str, chunks: Iterable[bytes | memoryview]) -> Checksums:
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


# --- safetensors files, written in chunks.
#
# The format: eight bytes with the length of a JSON header, the header (type, shape and place of each tensor, and text
# `__metadata__`), then the tensors' bytes. The library's own writer wants every tensor whole and in host memory, and its
# file has to be read again for a checksum; this one takes bytes from wherever they are, a chunk at a time, and adds
# them up on the way. Python is free for other threads while it works. The bytes are the same.

COPY_CHUNK_BYTES = 1 << 26  # bytes on their way from a device to a file
SAFETENSORS_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of types, in the order their tensors stand in a file: wide ones first, so that all are aligned."""
DTYPE_ORDER = {dtype: place for place, dtype in enumerate(SAFETENSORS_DTYPES)}


@dataclass(frozen=True)
class TensorBytes:
    """A tensor as its bytes: one or more flat pieces, on any device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Tensor, ...]
    """uint8, each one-dimensional; joined they are the tensor in row-major order."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def chunks(self) -> Iterator[memoryview]:
        """The bytes in host memory, a chunk at a time."""
        for piece in self.pieces:
            for start in range(0, piece.numel(), COPY_CHUNK_BYTES):
                yield piece[start : start + COPY_CHUNK_BYTES].cpu().numpy().data

    @cached_property
    def tensor(self) -> Tensor:
        """The tensor; of one that was taken in several pieces this is another copy."""
        flat = self.pieces[0] if len(self.pieces) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *self.pieces])
        return flat.view(self.dtype).view(self.shape)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 and one-dimensional: a view where it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file to be."""

    name: str
    tensors: Mapping[str, TensorBytes]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Checksums:
        return write_file(folder, self.name, self._chunks())

    def _chunks(self) -> Iterator[bytes | memoryview]:
        yield safetensors_header(self.tensors, self.metadata)
        for name in write_order(self.tensors):
            yield from self.tensors[name].chunks()


def write_order(tensors: Mapping[str, TensorBytes]) -> list[str]:
    """Names in the order of their bytes."""
    return sorted(tensors, key=lambda name: (DTYPE_ORDER[tensors[name].dtype], name))


def safetensors_header(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> bytes:
    """Everything before the tensors' bytes."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in write_order(tensors):
        held = tensors[name]
        end = position + held.num_bytes
        described[name] = {
            "dtype": SAFETENSORS_DTYPES[held.dtype],
            "shape": list(held.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# --- One folder filled by several processes: each writes its part, the first makes them a whole.
#
# They meet in the file system and nowhere else: a thread may write while training uses the network, and no two kinds of
# message can come in each other's way. A process that has written its files leaves a list of them, with sizes and
# checksums, or the reason why it could not; the first process waits for all lists, with a deadline. The folder has a
# temporary name until it is whole, so what a killed run leaves is swept away like any other torn write.

PART_LISTS = "part-*.json"
PARTS_DEADLINE_S = 1800.0
PARTS_POLL_S = 0.05


def write_part(path: Path, snapshot: Snapshot) -> None:
    """This process's files of the folder `path` to be. The first process is told what is in them, or why there are none."""
    folder = parts_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sums = snapshot.write(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk may refuse this too; the first process does not wait for ever
            _write_part_list(folder, snapshot.part, {"error": f"{type(error).__name__}: {error}"})
        raise
    _write_part_list(folder, snapshot.part, {"files": sums})


@contextmanager
def assembled_folder(path: Path, part: WriterRank) -> Iterator[tuple[Path, Checksums]]:
    """For the first process, after its own part: the folder with everyone's files in it, which becomes `path`."""
    folder = parts_folder(path)
    sums = _wait_for_parts(folder, part)
    for file in folder.glob(PART_LISTS):
        file.unlink()
    yield folder, sums
    commit_directory(folder, path)


def writer_rank_of(tensors: Iterable[Tensor]) -> WriterRank:
    """Which of the processes that hold these tensors this is: the only one, unless one of them is spread."""
    from burnish.core.sharded_tensors import is_dtensor

    if not any(is_dtensor(tensor) for tensor in tensors):
        return WriterRank()
    from torch import distributed

    return WriterRank(distributed.get_rank(), distributed.get_world_size())


def parts_folder(path: Path) -> Path:
    """The temporary name that every process knows."""
    return path.with_name(f"{TEMPORARY_PREFIX}parts-{path.name}")


def _write_part_list(folder: Path, part: WriterRank, said: dict[str, Any]) -> None:
    atomic_write(folder / f"part-{part.index:05d}.json", json.dumps(said))


def _wait_for_parts(folder: Path, part: WriterRank) -> Checksums:
    until = time.monotonic() + PARTS_DEADLINE_S
    waiting = set(range(part.count))
    sums: Checksums = {}
    while waiting:
        for rank in sorted(waiting):
            file = folder / f"part-{rank:05d}.json"
            if not file.exists():
                continue
            said = json.loads(file.read_text())
            if "error" in said:
                raise UserError(f"process {rank} of {part.count} could not write its part of {folder}: {said['error']}")
            sums |= said["files"]
            waiting.discard(rank)
        if waiting and time.monotonic() > until:
            raise UserError(
                f"{folder}: no word from processes {sorted(waiting)} of {part.count} after {PARTS_DEADLINE_S:.0f} s; are they alive, and "
                "do they see the same folder?"
            )
        if waiting:
            time.sleep(PARTS_POLL_S)
    return sums
