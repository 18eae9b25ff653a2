"""safetensors files, written in chunks.

The format: eight bytes with the length of a JSON header, the header (type, shape and place of each tensor, and text
`__metadata__`), then the tensors' bytes. The library's own writer wants every tensor whole and in host memory, and its
file has to be read again for a checksum; this one takes bytes from wherever they are, a chunk at a time, and adds
them up on the way. Python is free for other threads while it works. The bytes are the same.
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

from burnish.run.contents import Sums, write_file

CHUNK = 1 << 26  # bytes on their way from a device to a file
DTYPES = {
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
PLACES = {dtype: place for place, dtype in enumerate(DTYPES)}


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
            for start in range(0, piece.numel(), CHUNK):
                yield piece[start : start + CHUNK].cpu().numpy().data

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

    def write(self, folder: Path) -> Sums:
        return write_file(folder, self.name, self._chunks())

    def _chunks(self) -> Iterator[bytes | memoryview]:
        yield header(self.tensors, self.metadata)
        for name in order(self.tensors):
            yield from self.tensors[name].chunks()


def order(tensors: Mapping[str, TensorBytes]) -> list[str]:
    """Names in the order of their bytes."""
    return sorted(tensors, key=lambda name: (PLACES[tensors[name].dtype], name))


def header(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> bytes:
    """Everything before the tensors' bytes."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in order(tensors):
        held = tensors[name]
        end = position + held.num_bytes
        described[name] = {"dtype": DTYPES[held.dtype], "shape": list(held.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
