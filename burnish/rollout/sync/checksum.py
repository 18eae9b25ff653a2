"""A checksum of a tensor's bits that any device computes: integer arithmetic, so the order of summation does not matter."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from burnish.core.keys import GOLDEN, MASK, mix
from burnish.core.noise import signed

BLOCK = 1 << 15
"""Words that share a table of multipliers: what a CPU's cache holds."""
AT_ONCE = {"cpu": 1, "cuda": 256}
"""Blocks summed in one go; the result does not depend on it."""
LOW = (1 << 32) - 1


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Of a tensor's 64-bit words w: the sums of (w_i xor (w_i >> 32)) m_i mod 2^64 in each block, chained; and the size.

    A word that changes changes it; so do words in another order or place, but for a chance of 2^-32 or less. m are odd random
    numbers. The shift is for the highest bits, whose products with all odd numbers are alike: without it two changed signs would
    make up for each other.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = raw.numel()
    if size % 8:
        raw = torch.cat([raw, raw.new_zeros(-size % 8)])
    words = raw.view(torch.int64)
    multipliers, total = _multipliers(str(words.device)), 0
    step = BLOCK * AT_ONCE[words.device.type]
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        whole = part.numel() // BLOCK * BLOCK
        for rows in (part[:whole].view(-1, BLOCK), part[whole:].view(1, -1)):
            folded = (rows >> 32).bitwise_and_(LOW).bitwise_xor_(rows)
            for found in folded.mul_(multipliers[: rows.shape[1]]).sum(1).tolist() if rows.numel() else ():
                total = (total * GOLDEN + found) & MASK
    return (total * GOLDEN + size) & MASK


@lru_cache(maxsize=8)
def _multipliers(device: str) -> Tensor:
    return torch.tensor([signed(mix(k + 1) | 1) for k in range(BLOCK)], device=device)
