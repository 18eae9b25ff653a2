"""The contents of a checkpoint: snapshots, safetensors files, checksums, and one folder written by several processes.

Saving has two phases. Taking a snapshot copies the values of all files out of the training's reach (`saver.py`) and writes
nothing. Writing then needs only the snapshot and a folder, so a thread can do it. Sizes and checksums are computed from the
values in memory, so they also detect a disk that wrote something else.

safetensors files are written in chunks. The format is: eight bytes with the length of a JSON header; the header with dtype,
shape and position of each tensor and a text `__metadata__`; then the bytes of the tensors. The library's writer needs all tensors in
host memory, and its file must be read again for a checksum. This writer takes the bytes from any device chunk by chunk,
computes the checksum on the way, and releases the interpreter's lock. The files are byte-identical.

Several processes that save one folder meet in the file system only, so that saving never interferes with the collectives of
training. Each process writes its files, then a list of them with sizes and checksums, or the reason why it failed. Process 0
waits for all lists, with a deadline. The folder has a temporary name until it is complete, so that a killed run leaves only
what `remove_leftovers` deletes.
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

Checksums = dict[str, dict[str, Any]]
"""Size and CRC-32 of each file, by its name in the folder."""
READ_CHUNK_BYTES = 1 << 22
COPY_CHUNK_BYTES = 1 << 26
"""Bytes that are copied from a device to a file at a time."""
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
"""The format's dtype names, in the order of the tensors in a file: wide dtypes first, so that all tensors are aligned."""
DTYPE_ORDER = {dtype: index for index, dtype in enumerate(SAFETENSORS_DTYPES)}
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


@dataclass(frozen=True)
class TensorBytes:
    """The bytes of a tensor: one or more flat pieces, on any device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Tensor, ...]
    """One-dimensional uint8 tensors. Concatenated, they are the tensor in row-major order."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in host memory, chunk by chunk."""
        for piece in self.pieces:
            for start in range(0, piece.numel(), COPY_CHUNK_BYTES):
                yield piece[start : start + COPY_CHUNK_BYTES].cpu().numpy().data

    @cached_property
    def tensor(self) -> Tensor:
        """The tensor. If there are several pieces, this makes another copy."""
        flat = self.pieces[0] if len(self.pieces) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *self.pieces])
        return flat.view(self.dtype).view(self.shape)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as one-dimensional uint8: a view if it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file that a snapshot will write."""

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
    """Return the names in the order of their bytes in the file."""
    return sorted(tensors, key=lambda name: (DTYPE_ORDER[tensors[name].dtype], name))


def safetensors_header(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> bytes:
    """Return everything before the bytes of the tensors."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in write_order(tensors):
        tensor = tensors[name]
        end = position + tensor.num_bytes
        described[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


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


def writer_rank_of(tensors: Iterable[Tensor]) -> WriterRank:
    """Return the rank of this process among those that hold the tensors. It is the only one unless a tensor is a DTensor."""
    from burnish.core.sharded_tensors import is_dtensor

    if not any(is_dtensor(tensor) for tensor in tensors):
        return WriterRank()
    from torch import distributed

    return WriterRank(distributed.get_rank(), distributed.get_world_size())


def parts_folder(path: Path) -> Path:
    """Return the temporary folder of all parts. Every process computes the same name."""
    return path.with_name(f"{TEMPORARY_PREFIX}parts-{path.name}")


def _write_part_list(folder: Path, part: WriterRank, message: dict[str, Any]) -> None:
    atomic_write(folder / f"part-{part.index:05d}.json", json.dumps(message))


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
