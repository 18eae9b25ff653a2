"""Tensors that wait in host memory between the forward and the backward pass.

On a GPU both copies run on a stream of their own beside the arithmetic: a tensor leaves while the next layer computes, and
comes back while the layer after it, which the backward pass reaches first, is differentiated. Elsewhere a copy is made at
once, so that the same code can be tested.
"""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch import Tensor


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Waiting:
    """A tensor in host memory; `before` is the one that went before it, and will be wanted after it."""

    def __init__(self, tensor: Tensor, before: Waiting | None) -> None:
        self._before = None if before is None else weakref.ref(before)
        self._source: Tensor | None = None
        self._coming: Tensor | None = None
        self.device = tensor.device
        if not tensor.is_cuda:
            self.host = tensor.to("cpu", copy=True)
            return
        if before is not None:
            before._gone()
        side = _side_stream(tensor.device)
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            self.host.copy_(tensor, non_blocking=True)
        self._left = side.record_event()
        self._source = tensor  # until the copy is made: its memory must not be given to another

    def get(self) -> Tensor:
        """The tensor on its device; the one before it sets out."""
        if self.device.type != "cuda":
            return self.host
        found = self._source  # the last to leave is wanted first, and still here
        if found is None:
            self._fetch()
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
            found = self._coming
            assert found is not None
        self._source = self._coming = None
        before = None if self._before is None else self._before()
        if before is not None:
            before._fetch()
        return found

    def _gone(self) -> None:
        """The device's copy is let go of once it has left."""
        if self._source is not None:
            torch.cuda.current_stream(self.device).wait_event(self._left)
            self._source = None

    def _fetch(self) -> None:
        if self._source is not None or self._coming is not None:
            return
        side, current = _side_stream(self.device), torch.cuda.current_stream(self.device)
        self._coming = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        side.wait_stream(current)  # what had this memory before may still be in use
        with torch.cuda.stream(side):
            self._coming.copy_(self.host, non_blocking=True)
        self._arrived = side.record_event()


class Queue:
    """Where tensors go to wait, one after the other; each knows the one before it."""

    def __init__(self) -> None:
        self._last: weakref.ref[Waiting] | None = None

    def put(self, tensor: Tensor) -> Waiting:
        waiting = Waiting(tensor, None if self._last is None else self._last())
        self._last = weakref.ref(waiting)
        return waiting
