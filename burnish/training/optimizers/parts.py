"""Rows of a parameter on their way through an update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
