"""Numbers of one byte: a block of a row shares a scale, its largest magnitude (Dettmers et al., 2110.02861).

A byte is a small floating-point number, so that its relative precision is the same over five decades: what Adam divides by
matters by its ratio, not by its difference. The largest of a block is exact.

    signed      sign, 4 bits of exponent, 3 of mantissa, and 0
    unsigned    4 bits of exponent, 4 of mantissa, and no 0: a second moment that is rounded to 0 would divide by
                nothing (Li et al., 2309.01507)

Both reach down to 2^-15.9 of the scale. Rounding is stochastic: a second moment moves by a thousandth in an update, which
rounding to nearest would undo every time, so that it could rise but never fall. Blocks do not cross rows, so codes
and scales can be cut by rows as the parameter they belong to.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from burnish.core.random_keys import fold

# --- Stochastic rounding: to one of the two neighbours, each with the probability that makes the mean exact.
#
# An update of 1e-6 is far below what bfloat16 can add to a weight; rounded to nearest it is lost every time, rounded at
# random it happens now and then, and is right on average (Zamirai et al., 2010.06192). Weights then need no float32 copy.
#
# The bits of a positive float count its neighbours in order, so dropping `n` low bits after adding a uniform integer of `n`
# bits rounds up exactly as often as the dropped part is large. Randomness is a function of what it is for (a
# parameter's name, which of all updates, which rows), so a run that is resumed draws what it would have drawn.

DROPPED_BITS = 16
"""Bits of a float32 that a bfloat16 does not have."""


def seed_for(*words: int | str) -> int:
    """63 bits that depend on these words alone."""
    return fold("rounding", *words) >> 1


def generator_for(device: torch.device, *words: int | str) -> torch.Generator:
    """Random numbers that depend on these words and the kind of device alone."""
    return torch.Generator(device).manual_seed(seed_for(*words))


def random_bits(like: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Uniform integers of so many bits, int32, one for each number of a tensor."""
    return torch.empty(like.shape, dtype=torch.int32, device=like.device).random_(0, 1 << bits, generator=generator)


def to_bfloat16(wide: Tensor, generator: torch.Generator) -> Tensor:
    """float32 numbers rounded stochastically; what bfloat16 can hold stays as it is."""
    bits = random_bits(wide, DROPPED_BITS, generator).add_(wide.view(torch.int32))
    return bits.bitwise_and_(-1 << DROPPED_BITS).view(torch.float32).to(torch.bfloat16)


MAX_BLOCK = 256
ONE_BITS = 127 << 23
"""The bits of 1.0 in float32: as many exponents and mantissas lie below it as a code can count."""
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def block_size(columns: int) -> int:
    """The largest length of at most `BLOCK` that divides a row."""
    return next(size for size in range(min(MAX_BLOCK, columns), 0, -1) if columns % size == 0)


def byte_format(signed: bool) -> tuple[int, int, int]:
    """How many bits of a float32 are dropped, the largest magnitude's code, and the bits of the smallest code's."""
    dropped, top = (20, 127) if signed else (19, 255)
    return dropped, top, (ONE_BITS >> dropped) - top


@cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """[256] the number each code stands for."""
    dropped, top, lowest = byte_format(signed)
    magnitudes = (torch.arange(top + 1, dtype=torch.int32) + lowest).bitwise_left_shift_(dropped).view(torch.float32)
    if signed:
        magnitudes[0] = 0
        magnitudes = torch.cat([magnitudes, -magnitudes])
    return magnitudes.to(device)


def quantise(numbers: Tensor, signed: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """float32 [..., C] to codes [..., C] of a byte and scales [..., blocks]; negative numbers need `signed`."""
    dropped, top, lowest = byte_format(signed)
    blocks = numbers.unflatten(-1, (-1, block_size(numbers.shape[-1])))
    scales = torch.linalg.vector_norm(blocks, torch.inf, -1)
    bits = (blocks / scales.clamp_min(SMALLEST_NORMAL)[..., None]).flatten(-2).view(torch.int32)
    codes = random_bits(numbers, dropped, generator)
    codes.add_(bits & 0x7FFFFFFF if signed else bits).bitwise_right_shift_(dropped).sub_(lowest).clamp_(0, top)
    if signed:
        codes.bitwise_or_(bits.bitwise_right_shift_(24).bitwise_and_(128))
    return codes.to(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The inverse of `encode`, but for rounding."""
    numbers = _levels(signed, codes.device).index_select(0, codes.flatten().int())
    return numbers.view(*scales.shape, -1).mul_(scales[..., None]).view(codes.shape)
