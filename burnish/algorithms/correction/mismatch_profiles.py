"""Where the gap is: by position, by how likely the engine found the token, and the worst tokens one by one.

A wrong temperature is alike at all positions, and of one sign at likely tokens and of the other at unlikely ones; a prompt
that was encoded otherwise is largest at the first tokens and fades; other weights (stale, rounded, noisy) are felt at all
probabilities, and less at the first token than later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from burnish.algorithms.correction.rollout_mismatch import MAX_ABS_LOGP, refuse_nan_logp
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum

NUM_POSITION_DOUBLINGS = 24
"""Positions up to 2^24 are told apart: longer than any completion."""
NUM_PROBABILITY_DECADES = 6
"""Probabilities down to 1e-6 are told apart; a token is below that by accident, and one bucket is enough for those."""


@dataclass(frozen=True)
class ComparedTokens:
    """M tokens the model wrote to which both engine and trainer gave a log-prob, in the order of their batch."""

    batch: Batch
    place: Tensor  # [M] where in the batch
    trainer: Tensor  # [M] log-probs
    engine: Tensor  # [M] log-probs
    gap: Tensor  # [M] l = trainer - engine, in float64

    @property
    def num_tokens(self) -> int:
        return self.place.shape[0]

    @cached_property
    def offsets(self) -> Tensor:
        """[S+1] where the sequences of the batch begin among these tokens."""
        return torch.searchsorted(self.place, self.batch.offsets)

    @cached_property
    def position(self) -> Tensor:
        """[M] how many tokens the model had written before, in the same sequence."""
        mask, starts = self.batch.action_mask, self.batch.offsets[:-1].clamp(max=max(0, self.batch.num_tokens - 1))
        written = mask.cumsum(0)  # [N] with the token itself
        before = written[starts] - mask[starts].long()  # [S]
        return written.index_select(0, self.place) - 1 - torch.repeat_interleave(before, self.offsets.diff())

    def alone(self) -> Batch:
        """These tokens as a batch of their own, with what is reported of a gap: both log-probs, and `version` where it is known."""
        columns = {"action_mask": torch.ones_like(self.place, dtype=torch.bool)}
        columns |= {"old_logp": self.trainer, "behaviour_logp": self.engine}
        if "version" in self.batch.token:
            columns["version"] = self.batch.token["version"].index_select(0, self.place)
        return Batch(self.batch.tokens.index_select(0, self.place), self.offsets, columns)


def compare_tokens(batch: Batch, trainer: Tensor, known: Tensor) -> ComparedTokens:
    """The tokens of `known` [N], where the trainer's log-probs are those of `trainer` [N]; none of both may be nan."""
    place = known.nonzero().squeeze(1)
    old, behaviour = (x.detach().index_select(0, place) for x in (trainer, batch.token["behaviour_logp"]))
    gap = old.clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double().sub_(behaviour.clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP))
    if bool(gap.isnan().any()):
        refuse_nan_logp(old, behaviour)
    return ComparedTokens(batch, place, old, behaviour, gap)


def mismatch_profiles(seen: ComparedTokens) -> dict[str, float]:
    """Mean |l| (`abs`), mean l (`signed`) and number of tokens in each bucket that has any, by position and by probability.

    Names are `mismatch/by_position/3/abs`, `mismatch/by_probability/1e-2/tokens`: a bucket is called by its lower end and
    reaches to the next, which is 2k + 1 after position k and ten times the engine's probability; `0` holds all up to 1e-6.
    """
    if seen.num_tokens == 0:
        return {}
    table = _table(seen)
    positions = [str(2**k - 1) for k in range(NUM_POSITION_DOUBLINGS + 1)]
    probabilities = ["0", *(f"1e-{k}" for k in range(NUM_PROBABILITY_DECADES, 0, -1))]
    values: dict[str, float] = {}
    for kind, names, sums in (("position", positions, table.sum(2)), ("probability", probabilities, table.sum(1))):
        for name, size, signed, count in zip(names, *sums.tolist(), strict=True):
            if count:
                stem = f"mismatch/by_{kind}/{name}/"
                values |= {stem + "abs": size / count, stem + "signed": signed / count, stem + "tokens": count}
    return values


def worst_tokens(seen: ComparedTokens, num: int) -> Tensor:
    """[K] which of the M tokens have the largest |l|: the worst first, of equals the first in the batch, none with l = 0."""
    size = seen.gap.abs()
    if seen.num_tokens == 0:
        return seen.place
    least = size.topk(min(num, seen.num_tokens)).values[-1]
    # Which of several equals topk takes is the library's business; a run that is resumed must take the same.
    candidates = ((size >= least) & (size > 0)).nonzero().squeeze(1)
    return candidates[size[candidates].argsort(descending=True, stable=True)[:num]]


def _table(seen: ComparedTokens) -> Tensor:
    """[3, DOUBLINGS + 1, DECADES + 1] the sum of |l|, the sum of l and the number of tokens, by position and decade."""
    engine = seen.engine
    doublings = 2 ** torch.arange(1, NUM_POSITION_DOUBLINGS + 1, device=engine.device) - 1
    decades = (
        torch.arange(-NUM_PROBABILITY_DECADES, 0, device=engine.device, dtype=torch.float64)
        .mul_(math.log(10))
        .to(engine.dtype)
    )
    position = torch.bucketize(seen.position, doublings, right=True)
    bucket = position.mul_(NUM_PROBABILITY_DECADES + 1).add_(torch.bucketize(engine, decades))
    num = (NUM_POSITION_DOUBLINGS + 1) * (NUM_PROBABILITY_DECADES + 1)
    add = _sums if engine.device.type == "cpu" else _sums_in_order
    return add(seen.gap, bucket, num).view(3, NUM_POSITION_DOUBLINGS + 1, NUM_PROBABILITY_DECADES + 1)


def _sums(gap: Tensor, bucket: Tensor, num: int) -> Tensor:
    """[3, num] the sum of |l|, the sum of l and the number of tokens in each bucket."""
    count = torch.bincount(bucket, minlength=num).double()
    return torch.stack([torch.bincount(bucket, weights=w, minlength=num) for w in (gap.abs(), gap)] + [count])


def _sums_in_order(gap: Tensor, bucket: Tensor, num: int) -> Tensor:
    """The same where threads add in any order, and a sum by ids would differ from one run to the next."""
    bucket, order = bucket.sort(stable=True)
    gap = gap[order]
    offsets = torch.searchsorted(bucket, torch.arange(num + 1, device=bucket.device))
    sums = [contiguous_sum(values, offsets) for values in (gap.abs(), gap)]
    return torch.stack([*sums, offsets.diff().double()])


# --- Exact quantiles of any number of weights, by partition: nothing is sorted but rows.


def quantiles(values: Tensor, shares: Sequence[float]) -> Tensor:
    """The quantiles of [M] at increasing `shares`, interpolated linearly between the two nearest values."""
    last = values.shape[0] - 1
    ranks = [int(share * last) for share in shares]
    pairs = _neighbours_on_cpu(values, ranks) if values.device.type == "cpu" else _neighbours_on_device(values, ranks)
    return _interpolated(pairs, values.shape[0], shares)


def row_quantiles(values: Tensor, counts: Tensor, shares: Sequence[float]) -> Tensor:
    """The quantiles of [R] values that occur `counts` times each."""
    values, order = values.sort()
    ends = counts[order].cumsum(0)
    last = int(ends[-1]) - 1
    ranks = torch.tensor([int(share * last) for share in shares], device=values.device)
    found = [values[torch.searchsorted(ends, r.clamp(max=last), right=True)] for r in (ranks, ranks + 1)]
    return _interpolated(torch.stack(found, 1), last + 1, shares)


def _neighbours_on_cpu(values: Tensor, ranks: Sequence[int]) -> Tensor:
    """[K, 2] the values of rank r and r + 1. What is left of a rank is never looked at again, so that all of them
    together cost two or three partitions; torch's kthvalue is several times slower.
    """
    left, start, found = values.numpy().copy(), 0, []
    for rank in ranks:
        left[start:].partition(rank - start)
        start = rank
        above = left[rank + 1 :]
        found.append([left[rank], above.min() if above.size else left[rank]])
    return torch.tensor(found, dtype=values.dtype)


def _neighbours_on_device(values: Tensor, ranks: Sequence[int]) -> Tensor:
    last = values.shape[0] - 1
    return torch.stack(
        [torch.stack([values.kthvalue(min(r, last) + 1).values for r in (rank, rank + 1)]) for rank in ranks]
    )


def _interpolated(pairs: Tensor, num: int, shares: Sequence[float]) -> Tensor:
    places = torch.tensor([share * (num - 1) for share in shares], dtype=pairs.dtype, device=pairs.device)
    return pairs[:, 0] + (pairs[:, 1] - pairs[:, 0]) * places.frac()
