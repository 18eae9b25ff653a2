"""Forward results that are made again in the backward pass instead of being kept.

Autograd asks a pair of hooks what to keep of every tensor that a backward formula needs. Here it keeps a number, and the
stretch of forward that made the tensor runs again when the first of them is asked for. `recomputed` does that with all that
a function saves. `lent` does it with a cheap function whose result an expensive one reads: the expensive one runs once.

torch.utils.checkpoint does the former too, but imports the compiler for it, seconds of every start, and always runs
everything that comes before the last tensor needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Inputs = Callable[[], tuple[Any, ...]]
"""The inputs of a stretch, from wherever they wait."""


class _Enough(Exception):
    """All tensors that were saved have been made again."""


class _Stretch:
    """A function run once in the forward pass, and again in the backward pass for what it saved and gave."""

    def __init__(self, function: Callable[..., Tensor], inputs: Inputs) -> None:
        self.function, self.inputs = function, inputs
        self.num_saved = 0
        self.is_lent = False
        self.saved: list[Tensor | None] | None = None
        self.result: Tensor | None = None

    def pack(self, tensor: Tensor) -> int:
        self.num_saved += 1
        return self.num_saved - 1

    def unpack(self, index: int) -> Tensor:
        self.run_again()
        assert self.saved is not None
        tensor, self.saved[index] = (
            self.saved[index],
            None,
        )  # its memory goes when the formula that asked is done with it
        if tensor is None:
            raise RuntimeError("a saved tensor was read twice; an autograd function must read ctx.saved_tensors once")
        return tensor

    def run_again(self) -> None:
        """Once; what is found is there until the last formula that needs it has run."""
        if self.saved is not None:
            return
        found: list[Tensor | None] = []

        def pack(tensor: Tensor) -> None:
            found.append(tensor.detach())
            # Formulas save what they read before they compute: after the last one nothing is worth computing.
            if len(found) == self.num_saved and not self.is_lent:
                raise _Enough

        def unpack(nothing: None) -> Tensor:
            raise RuntimeError("the graph of a forward that runs again has no backward")

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
                result = self.function(*self.inputs())
            self.result = result.detach() if self.is_lent else None
        except _Enough:
            pass
        if len(found) != self.num_saved:
            raise RuntimeError(f"a forward saved {self.num_saved} tensors, and {len(found)} when it ran again")
        self.saved = found


def as_leaf(x: Any) -> Any:
    """A tensor without its history, which asks for a gradient if it did; anything else as it is."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def recomputed(function: Callable[..., Tensor], *inputs: Any, held: Inputs | None = None) -> Tensor:
    """function(*inputs), of which the backward pass keeps the inputs alone, or what `held` gives for them."""
    if held is None:
        leaves = tuple(as_leaf(x) for x in inputs)
        held = lambda: leaves  # noqa: E731
    stretch = _Stretch(function, held)
    with saved_tensors_hooks(stretch.pack, stretch.unpack):
        return function(*inputs)


@contextmanager
def lent(function: Callable[..., Tensor], *inputs: Any) -> Iterator[Tensor]:
    """function(*inputs) for the operations of a `with` block, which do not keep it: it is made again when they need it."""
    leaves = tuple(as_leaf(x) for x in inputs)
    stretch = _Stretch(function, lambda: leaves)
    stretch.is_lent = True
    with saved_tensors_hooks(stretch.pack, stretch.unpack):
        result = function(*inputs)
    place, borrowers = result.untyped_storage().data_ptr(), 0

    def pack(tensor: Tensor) -> Any:
        nonlocal borrowers
        if tensor.untyped_storage().data_ptr() != place:
            return tensor
        borrowers += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        nonlocal borrowers
        if isinstance(packed, Tensor):
            return packed
        stretch.run_again()
        if stretch.result is None:
            raise RuntimeError("a lent tensor was read twice; an autograd function must read ctx.saved_tensors once")
        found = stretch.result.as_strided(*packed)
        borrowers -= 1
        if not borrowers:  # the function's own backward, which comes next, does not need it
            stretch.result = None
        return found

    with saved_tensors_hooks(pack, unpack):
        yield result
