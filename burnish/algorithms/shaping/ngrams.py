"""Repeated n-grams of everything that was written, in all sequences at once.

Every window of n written tokens gets a 64-bit hash, to which its trajectory adds its own; equal ones are neighbours after
one sort. A window never crosses from one sequence into another; tokens the model did not write (tool results) take no
place in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.advantages import trajectory_groups
from burnish.core.batch import Batch
from burnish.core.keys import GOLDEN, MULTIPLIER_1, MULTIPLIER_2
from burnish.core.noise import signed
from burnish.core.segments import segment_count


class Windows(NamedTuple):
    """The W windows of n written tokens of a batch."""

    start: Tensor  # [W] where each begins among the written tokens
    owner: Tensor  # [W] its trajectory, 0..T-1
    repeated: Tensor  # [W] bool: the same n tokens began earlier in this trajectory


def windows(batch: Batch, ngram: int) -> Windows:
    """All windows and whether each is a repeat."""
    written = batch.action_mask.nonzero().squeeze(1)
    sequence = batch.sequence_ids[written]
    hashes = window_hashes(batch.tokens[written], ngram)
    start = (sequence[: hashes.numel()] == sequence[ngram - 1 :]).nonzero().squeeze(1)
    of_sequence, _ = trajectory_groups(batch)
    keys = hashes[start] + _mix(~of_sequence)[sequence[start]]  # ~ keeps a trajectory's number apart from any token's
    keys, order = keys.sort(stable=True)  # of equals the earliest comes first
    repeated = torch.zeros_like(start, dtype=torch.bool)
    repeated[order[1:]] = keys[1:] == keys[:-1]
    return Windows(start, of_sequence[sequence[start]], repeated)


def repeat_share(batch: Batch, ngram: int) -> Tensor:
    """[S] 1 - unique / total over the n-grams of each trajectory; 0 where it has none."""
    owner, groups = trajectory_groups(batch)
    found = windows(batch, ngram)
    total = segment_count(found.owner, groups.numel())
    return (segment_count(found.owner, groups.numel(), found.repeated) / total.clamp(min=1).double())[owner]


def window_hashes(tokens: Tensor, ngram: int) -> Tensor:
    """[M - n + 1] int64 hash of every n tokens in a row, by doubling: hashes of 2k tokens join two of k."""
    if tokens.numel() < ngram:
        return tokens.new_zeros(0)
    hashes, covered = tokens.new_zeros(tokens.numel() + 1), 0  # of the first `covered` tokens of each window
    block, size = _mix(tokens), 1  # of `size` tokens in a row
    factor = MULTIPLIER_2
    while True:
        if ngram & size:
            hashes, covered = _join(hashes, block[covered:], factor), covered + size
        if covered == ngram:
            return hashes
        block, size = _join(block, block[size:], factor), 2 * size
        # A factor of its own for every size: powers of a single one modulo 2^64 collide on long regular texts, which
        # are just what is looked for here.
        factor = factor * GOLDEN


def _join(left: Tensor, right: Tensor, factor: int) -> Tensor:
    """right + factor * left, wrapping, as far as both reach."""
    return torch.add(right[: left.numel()], left[: right.numel()], alpha=signed(factor))


def _mix(x: Tensor) -> Tensor:
    """Small integers spread over 64 bits."""
    x = x * signed(GOLDEN)
    x = (x ^ ((x >> 32) & 0xFFFF_FFFF)) * signed(MULTIPLIER_1)
    return x ^ ((x >> 29) & ((1 << 35) - 1))
