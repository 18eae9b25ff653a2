"""Rows of a parameter on their way through an update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.core.sharded_tensors import is_spread
from burnish.training.optimizers.offload import State
from burnish.training.optimizers.rounding import generator_for, seed_for, to_bfloat16


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a parameter."""

    name: str
    start: int
    stop: int


@dataclass
class Part:
    """Some rows of a parameter with all that an update of them needs, on the device."""

    span: Span
    parameter: Tensor
    weight: Tensor
    """What the update is added to: the master copy, the parameter itself where its type is wide, or a wide copy to be rounded."""
    gradient: Tensor
    """In the type of the weight."""
    state: State
    lr: float
    decay: float
    updates: int
    """Updates of this parameter since its moments began, this one included."""
    number: int
    """Which update this is of all: what begins anew would meet the same randomness again, and no longer be right on average."""

    def seed(self, purpose: str) -> int:
        """Of this part in this update."""
        return seed_for(purpose, self.span.name, self.number, self.span.start)

    def generator(self, purpose: str) -> torch.Generator:
        """Randomness of this part in this update."""
        return generator_for(self.weight.device, purpose, self.span.name, self.number, self.span.start)

    def write(self) -> None:
        """The weight into the parameter."""
        if "master" in self.state:
            self.parameter.copy_(self.weight)
        elif self.weight.dtype != self.parameter.dtype:
            self.parameter.copy_(to_bfloat16(self.weight, self.generator("weight")))


# --- Parameters that are spread over ranks (`DTensor`), as an optimizer sees them.
#
# What works number by number works on the part this rank has (`core/sharded_tensors.py`). What needs a whole matrix puts it together here.


def num_shards(tensor: Tensor) -> int:
    """Into how many different parts a tensor is cut."""
    if not is_spread(tensor):
        return 1
    places = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in places if not placement.is_replicate())


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which every rank holds a part, spread as the parameter `like` is; all ranks must call this."""
    if not is_spread(like):
        return part
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    full: Tensor = spread.full_tensor()
    return full


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank holds whole; the inverse of `whole`."""
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate() for _ in like.placements]
    spread = DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
    part: Tensor = spread.redistribute(placements=like.placements).to_local()
    return part
