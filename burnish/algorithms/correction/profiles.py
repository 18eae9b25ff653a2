"""Where the gap is: by position, by how likely the engine found the token, and the worst tokens one by one.

A gap that grows with position points at stale weights or precision that accumulates; one at the first tokens at a prompt
that was encoded otherwise; one at unlikely tokens only at a truncated sampling distribution or a wrong temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.algorithms.correction.gap import LARGEST, Written, refuse_nan, written_of
from burnish.core.batch import Batch

DECADES = 8


@dataclass(frozen=True)
class Profile:
    """Gaps |old_logp - behaviour_logp| in K buckets, between one edge and the next."""

    edges: Tensor  # [K+1]
    count: Tensor  # [K] tokens
    mean: Tensor  # [K] 0 where there are none
    max: Tensor  # [K]


@dataclass(frozen=True)
class WorstTokens:
    """The K tokens of largest gap, the worst first."""

    sequence: Tensor  # [K] which sequence of the batch
    position: Tensor  # [K] where in it
    old_logp: Tensor  # [K] as the trainer has it
    behaviour_logp: Tensor  # [K] as the engine reported it


def profile_by_position(batch: Batch) -> Profile:
    """Buckets [0, 1), [1, 3), [3, 7), ... of how many tokens the model had written before, up to the longest sequence."""
    written = written_of(batch)
    place = torch.arange(1, 1 + int(written.offsets[-1]), device=batch.tokens.device)
    place -= torch.repeat_interleave(written.offsets[:-1], written.offsets.diff())
    # The exponent of a float is the number of binary digits, exactly; a rounded logarithm may miss a power of two.
    bucket = torch.frexp(place.double()).exponent.long() - 1
    num = int(bucket.max()) + 1 if bucket.numel() else 1
    edges = 2.0 ** torch.arange(num + 1, dtype=torch.float64, device=bucket.device) - 1
    return _profile(_gaps(written), bucket, edges)


def profile_by_probability(batch: Batch) -> Profile:
    """Buckets (0.1, 1], (0.01, 0.1], ... of the engine's probability, the least likely first: all up to 1e-8 together."""
    written = written_of(batch)
    gaps = _gaps(written)
    decade = (written.column("behaviour_logp").double() / -math.log(10)).floor().clamp(0, DECADES)
    edges = 10.0 ** torch.arange(-DECADES, 1, dtype=torch.float64, device=decade.device)
    return _profile(gaps, DECADES - decade.long(), torch.cat([edges.new_zeros(1), edges]))


def worst_tokens(batch: Batch, num: int = 16) -> WorstTokens:
    """The `num` tokens of largest gap, or all if there are fewer."""
    written = written_of(batch)
    gaps = _gaps(written)
    worst = gaps.topk(min(num, gaps.shape[0])).indices
    place = worst if written.where is None else written.where[worst]
    sequence = torch.searchsorted(batch.offsets, place, right=True) - 1
    old, behaviour = (batch.token[name][place] for name in ("old_logp", "behaviour_logp"))
    return WorstTokens(sequence, place - batch.offsets[sequence], old, behaviour)


def _gaps(written: Written) -> Tensor:
    """[M] |l|, at most 600."""
    old, behaviour = (written.column(name).clamp(-LARGEST, LARGEST).double() for name in ("old_logp", "behaviour_logp"))
    refuse_nan(old, behaviour)
    return old.sub_(behaviour).abs_()


def _profile(gaps: Tensor, bucket: Tensor, edges: Tensor) -> Profile:
    num = edges.shape[0] - 1
    count = torch.bincount(bucket, minlength=num)
    mean = torch.bincount(bucket, weights=gaps, minlength=num) / count.clamp(min=1)
    largest = gaps.new_zeros(num).scatter_reduce(0, bucket, gaps, "amax")
    return Profile(edges, count, mean, largest)
