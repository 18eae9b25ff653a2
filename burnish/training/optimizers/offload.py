"""Offloads optimizer state to host memory, and brings it to the device one batch at a time.

The state is in one block of host memory, page-locked if the device is a GPU. While one batch is updated, the next one is copied
in on one stream and the last one is copied out on another. Two buffers are all the device memory it takes. Events order the
copies, so the host never waits. On a CPU the same copies are made one after the other. Values are only moved, never changed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.config.errors import UserError

TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""
State = dict[str, Tensor]

ALIGNMENT = 256


def num_bytes_of(spec: TensorSpec) -> int:
    """Bytes of a tensor."""
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize


def _aligned_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(-(-num_bytes_of(spec) // ALIGNMENT) * ALIGNMENT for spec in specs)


def carve_tensors(block: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Aligned tensors of these shapes, one after the other in a block of bytes."""
    tensors, start = [], 0
    for spec in specs:
        shape, dtype = spec
        tensors.append(block[start : start + num_bytes_of(spec)].view(dtype).view(shape))
        start += _aligned_bytes([spec])
    return tensors


class HostStates:
    """State tensors in host memory by name, zero at first."""

    def __init__(self, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        self.device = device
        block = torch.zeros(_aligned_bytes(list(specs.values())), dtype=torch.uint8)
        self.tensors = dict(zip(specs, carve_tensors(block, list(specs.values())), strict=True))
        self.streams: tuple[Any, Any] | None = None
        if device.type == "cuda":
            _page_lock(block, self)
            self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def synchronize(self) -> None:
        """Wait until all copies back to the host are done; call this before the host reads."""
        if self.streams is not None:
            self.streams[1].synchronize()

    def visits(self, batches: Sequence[list[State]]) -> Iterator[list[State]]:
        """Yield the states of each batch on the device, in turn; they are copied back when the next batch is requested."""
        if not batches:
            return
        room = max(_aligned_bytes(_tensor_specs(batch)) for batch in batches)
        buffers = [torch.empty(room, dtype=torch.uint8, device=self.device) for _ in batches[:2]]
        gone: list[Any] = [None] * len(buffers)
        if self.streams is not None:
            self.streams[0].wait_stream(torch.cuda.current_stream(self.device))
        arriving = self._bring(batches[0], buffers[0], None)
        for number, batch in enumerate(batches):
            states, arrived = arriving
            if number + 1 < len(batches):
                free = (number + 1) % 2
                arriving = self._bring(batches[number + 1], buffers[free], gone[free])
            if arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(arrived)
            yield states
            gone[number % 2] = self._take_back(batch, states)
        if self.streams is not None:  # the allocator may reuse the buffers, and only knows the current stream
            torch.cuda.current_stream(self.device).wait_stream(self.streams[1])

    def _bring(self, batch: list[State], buffer: Tensor, is_free: Any) -> tuple[list[State], Any]:
        """Copies of a batch in a buffer, made after the event `is_free`; and the event of their arrival."""
        here = iter(carve_tensors(buffer, _tensor_specs(batch)))
        states = [{key: next(here) for key in state} for state in batch]
        if self.streams is None:
            _copy(batch, states)
            return states, None
        with torch.cuda.stream(self.streams[0]):
            if is_free is not None:
                self.streams[0].wait_event(is_free)
            _copy(batch, states)
            return states, self.streams[0].record_event()

    def _take_back(self, batch: list[State], states: list[State]) -> Any:
        if self.streams is None:
            _copy(states, batch)
            return None
        self.streams[1].wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.streams[1]):
            _copy(states, batch)
            return self.streams[1].record_event()


def _tensor_specs(batch: list[State]) -> list[TensorSpec]:
    return [(tuple(t.shape), t.dtype) for state in batch for t in state.values()]


def _copy(sources: list[State], targets: list[State]) -> None:
    for source, target in zip(sources, targets, strict=True):
        for key, tensor in source.items():
            target[key].copy_(tensor, non_blocking=True)


def _page_lock(block: Tensor, owner: HostStates) -> None:
    """Page-lock a block while its owner lives.

    `pin_memory` is not used: it rounds sizes up to a power of two, which can double the host memory.
    """
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(owner.device):
        code = runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)
    if int(code) != 0:
        raise UserError(
            f"optimizer.offload: {block.numel() / 2**30:.1f} GiB of host memory cannot be page-locked "
            f"({runtime.cudaGetErrorString(code)}): free host memory, raise `ulimit -l`, or use optimizer.name=adam8bit"
        )
    weakref.finalize(owner, _unlock, runtime, block).atexit = False  # the end of the process unlocks it as well


def _unlock(runtime: Any, block: Tensor) -> None:
    torch.cuda.synchronize()  # a copy may still be under way
    runtime.cudaHostUnregister(block.data_ptr())
