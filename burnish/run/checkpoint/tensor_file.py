"""safetensors files, written in chunks.

The format is: eight bytes with the length of a JSON header; the header with dtype,
shape and position of each tensor and a text `__metadata__`; then the bytes of the tensors. The library's writer needs all tensors in
host memory, and its file must be read again for a checksum. This writer takes the bytes from any device chunk by chunk,
computes the checksum on the way, and releases the interpreter's lock. The files are byte-identical.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from burnish.run.checkpoint.snapshot import Checksums, write_file

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
