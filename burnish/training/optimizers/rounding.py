"""Stochastic rounding: to one of the two neighbours, each with the probability that makes the mean exact.

An update of 1e-6 is far below what bfloat16 can add to a weight; rounded to nearest it is lost every time, rounded at
random it happens now and then, and is right on average (Zamirai et al., 2010.06192). Weights then need no float32 copy.

The bits of a positive float count its neighbours in order, so dropping `n` low bits after adding a uniform integer of `n`
bits rounds up exactly as often as the dropped part is large. Randomness is a function of what it is for (a
parameter's name, which of all updates, which rows), so a run that is resumed draws what it would have drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.keys import fold

DROPPED = 16
"""Bits of a float32 that a bfloat16 does not have."""


def seed_for(*words: int | str) -> int:
    """63 bits that depend on these words alone."""
    return fold("rounding", *words) >> 1


def generator_for(device: torch.device, *words: int | str) -> torch.Generator:
    """Random numbers that depend on these words and the kind of device alone."""
    return torch.Generator(device).manual_seed(seed_for(*words))


def noise(like: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Uniform integers of so many bits, int32, one for each number of a tensor."""
    return torch.empty(like.shape, dtype=torch.int32, device=like.device).random_(0, 1 << bits, generator=generator)


def to_bfloat16(wide: Tensor, generator: torch.Generator) -> Tensor:
    """float32 numbers rounded stochastically; what bfloat16 can hold stays as it is."""
    bits = noise(wide, DROPPED, generator).add_(wide.view(torch.int32))
    return bits.bitwise_and_(-1 << DROPPED).view(torch.float32).to(torch.bfloat16)
