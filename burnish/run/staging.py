"""Taking tensors out of training's way: copies in host memory that are made quickly and written slowly.

A GPU's tensors go to pinned memory, which is the fastest way off the device and lets all copies run at once; the
caller waits for the device once, after the last of them (`wait_for_devices`). Pinned memory comes in slabs of a fixed
size, because torch rounds every allocation up to a power of two and gives none back to the system: the slabs of one
checkpoint are those of the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from burnish.run.tensor_file import TensorBytes, flat_bytes

SLAB = 1 << 28
ALIGNMENT = 16
"""At which a tensor starts in its slab, so that its bytes can be looked at in its type."""
MARGIN = 0.1
"""Share of the host's memory that a copy leaves free."""
SMALL = 1 << 20
"""Bytes of a tensor for which nobody asks how much memory is left."""


class Stage(Protocol):
    """How a snapshot takes hold of a tensor."""

    def __call__(self, tensor: Tensor) -> TensorBytes: ...


def leave(tensor: Tensor) -> TensorBytes:
    """The tensor where it is: what it holds when it is written, which must be before training goes on."""
    return TensorBytes(tensor.dtype, tuple(tensor.shape), (flat_bytes(tensor),))


class HostCopy:
    """Copies for one snapshot, as long as there is room; then it leaves tensors where they are and `is_short`."""

    def __init__(self) -> None:
        self.is_short = False
        self.num_bytes = 0
        self._slab: Tensor | None = None
        self._used = 0

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> TensorBytes:
        source = flat_bytes(tensor)
        self.is_short = self.is_short or (source.numel() > SMALL and not _has_room(source.numel()))
        pieces = None if self.is_short else self._pinned(source) if tensor.is_cuda else [_own(source, tensor)]
        if pieces is None:
            self.is_short = True
            return leave(tensor)
        self.num_bytes += source.numel()
        return TensorBytes(tensor.dtype, tuple(tensor.shape), tuple(pieces))

    def _pinned(self, source: Tensor) -> list[Tensor] | None:
        """The bytes in slabs; None where the system refuses to pin one more."""
        pieces = []
        self._used += -self._used % ALIGNMENT
        while source.numel():
            if self._slab is None or self._used == SLAB:
                try:
                    self._slab, self._used = torch.empty(SLAB, dtype=torch.uint8, pin_memory=True), 0
                except RuntimeError:
                    return None
            piece = self._slab[self._used : self._used + source.numel()]
            piece.copy_(source[: piece.numel()], non_blocking=True)
            pieces.append(piece)
            source, self._used = source[piece.numel() :], self._used + piece.numel()
        return pieces


def _own(source: Tensor, tensor: Tensor) -> Tensor:
    """Bytes that are not the tensor's: they are copied already where it was not contiguous."""
    return source.clone() if source.data_ptr() == tensor.data_ptr() else source


def wait_for_devices() -> None:
    """Return when every copy from a GPU has arrived."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def free_memory() -> tuple[int, int] | None:
    """Bytes of host memory that can still be had, and that there are; None where the system does not say.

    In a container the smaller of the machine's and the container's.
    """
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return None
    machine = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    free, total = machine["MemAvailable"], machine["MemTotal"]
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free, total
    return min(free, limit - used + int(statistics["inactive_file"])), min(total, limit)


def _has_room(num_bytes: int) -> bool:
    found = free_memory()
    return found is None or found[0] - num_bytes > MARGIN * found[1]
