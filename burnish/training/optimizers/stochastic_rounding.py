"""Stochastic rounding to bfloat16, and 8-bit block quantisation with stochastic rounding.

Stochastic rounding goes to one of the two neighbours, with probabilities that make the mean exact. An update of 1e-6 is too small
to be added to a bfloat16 weight: rounding to nearest loses it every time, stochastic rounding keeps it on average (Zamirai et al.,
2010.06192), so that weights need no float32 copy. The bits of positive floats count up in order. Adding a uniform integer of `n`
bits and dropping the `n` low bits therefore rounds up with exactly the right probability.

In 8-bit quantisation a block of a row shares a scale, its largest magnitude (Dettmers et al., 2110.02861). A byte is a small
floating-point number, so that the relative precision is the same over five decades. The largest number of a block is exact.

    signed      sign, 4 bits of exponent, 3 of mantissa, and 0
    unsigned    4 bits of exponent, 4 of mantissa, and no 0: an update would divide by a second moment that was rounded to 0
                (Li et al., 2309.01507)

Both reach down to 2^-15.9 of the scale. A second moment moves by a thousandth per update: rounding to nearest would undo that every
time, so that it could rise but never fall. Blocks do not cross rows, so codes and scales can be sharded by rows like their parameter.

Random numbers are a function of their purpose (a parameter's name, the number of the update, the rows), so that a resumed run draws
the same ones.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from burnish.core.random_keys import fold

DROPPED_BITS = 16
"""Bits of a float32 that bfloat16 does not have."""


def seed_for(*words: int | str) -> int:
    """A 63-bit seed that depends on these words only."""
    return fold("rounding", *words) >> 1


def generator_for(device: torch.device, *words: int | str) -> torch.Generator:
    """A random generator that depends on these words and the kind of device only."""
    return torch.Generator(device).manual_seed(seed_for(*words))


def random_bits(like: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Uniform int32 integers with the given number of bits, one per element of `like`."""
    return torch.empty(like.shape, dtype=torch.int32, device=like.device).random_(0, 1 << bits, generator=generator)


def to_bfloat16(wide: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 numbers stochastically; numbers that bfloat16 can represent stay as they are."""
    bits = random_bits(wide, DROPPED_BITS, generator).add_(wide.view(torch.int32))
    return bits.bitwise_and_(-1 << DROPPED_BITS).view(torch.float32).to(torch.bfloat16)


MAX_BLOCK = 256
ONE_BITS = 127 << 23
"""The bits of 1.0 in float32. Codes count the exponents and mantissas below it."""
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def block_size(columns: int) -> int:
    """The largest divisor of a row's length that is at most `MAX_BLOCK`."""
    return next(size for size in range(min(MAX_BLOCK, columns), 0, -1) if columns % size == 0)


def byte_format(signed: bool) -> tuple[int, int, int]:
    """Number of dropped float32 bits, code of the largest magnitude, and (shifted) bits of the smallest one."""
    dropped, top = (20, 127) if signed else (19, 255)
    return dropped, top, (ONE_BITS >> dropped) - top


@cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """[256] the number that each code stands for."""
    dropped, top, lowest = byte_format(signed)
    magnitudes = (torch.arange(top + 1, dtype=torch.int32) + lowest).bitwise_left_shift_(dropped).view(torch.float32)
    if signed:
        magnitudes[0] = 0
        magnitudes = torch.cat([magnitudes, -magnitudes])
    return magnitudes.to(device)


def quantise(numbers: Tensor, signed: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """float32 [..., C] to uint8 codes [..., C] and scales [..., blocks]; negative numbers need `signed`."""
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
    """The inverse of `quantise`, up to rounding."""
    numbers = _levels(signed, codes.device).index_select(0, codes.flatten().int())
    return numbers.view(*scales.shape, -1).mul_(scales[..., None]).view(codes.shape)
