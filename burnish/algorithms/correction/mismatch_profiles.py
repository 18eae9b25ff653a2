"""Where the mismatch is: by position, by the engine's probability of the token, and the worst tokens one by one.

A wrong temperature is the same at all positions, and has opposite signs at likely and unlikely tokens. A prompt that was
encoded differently is largest at the first tokens and fades. Other weights (stale, rounded, noisy) show at all
probabilities, and less at the first token than later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from burnish.algorithms.correction.rollout_mismatch import MAX_ABS_LOGP, refuse_nan_logp
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum

NUM_POSITION_DOUBLINGS = 24
"""Positions up to 2^24 have their own buckets; no completion is longer."""
NUM_PROBABILITY_DECADES = 6
"""Probabilities down to 1e-6 have their own buckets; all smaller ones share one."""


@dataclass(frozen=True)
class ComparedTokens:
    """M action tokens with a log-prob from both engine and trainer, in batch order."""

    batch: Batch
    place: Tensor  # [M] where in the batch
    trainer: Tensor  # [M] log-probs
    engine: Tensor  # [M] log-probs
    log_ratio: Tensor  # [M] l = trainer - engine, in float64

    @property
    def num_tokens(self) -> int:
        return self.place.shape[0]

    @cached_property
    def offsets(self) -> Tensor:
        """[S+1] where the batch's sequences start among these tokens."""
        return torch.searchsorted(self.place, self.batch.offsets)

    @cached_property
    def position(self) -> Tensor:
        """[M] the number of action tokens before this one in its sequence."""
        mask, starts = self.batch.action_mask, self.batch.offsets[:-1].clamp(max=max(0, self.batch.num_tokens - 1))
        written = mask.cumsum(0)  # [N] with the token itself
        before = written[starts] - mask[starts].long()  # [S]
        return written.index_select(0, self.place) - 1 - torch.repeat_interleave(before, self.offsets.diff())

    def as_batch(self) -> Batch:
        """These tokens as a batch, with both log-probs and, if known, `version`."""
        columns = {"action_mask": torch.ones_like(self.place, dtype=torch.bool)}
        columns |= {"old_logp": self.trainer, "behaviour_logp": self.engine}
        if "version" in self.batch.token:
            columns["version"] = self.batch.token["version"].index_select(0, self.place)
        return Batch(self.batch.tokens.index_select(0, self.place), self.offsets, columns)


def compare_tokens(batch: Batch, trainer: Tensor, known: Tensor) -> ComparedTokens:
    """The tokens of `known` [N], with `trainer` [N] as the trainer's log-probs; raises if any log-prob is nan."""
    place = known.nonzero().squeeze(1)
    old, behaviour = (x.detach().index_select(0, place) for x in (trainer, batch.token["behaviour_logp"]))
    log_ratio = old.clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double().sub_(behaviour.clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP))
    if bool(log_ratio.isnan().any()):
        refuse_nan_logp(old, behaviour)
    return ComparedTokens(batch, place, old, behaviour, log_ratio)


def mismatch_profiles(seen: ComparedTokens) -> dict[str, float]:
    """Mean |l| (`abs`), mean l (`signed`) and number of tokens of each non-empty bucket, by position and by probability.

    Names are such as `mismatch/by_position/3/abs` and `mismatch/by_probability/1e-2/tokens`. A bucket is named by its lower
    end and reaches to the next bucket: from position k to 2k, or to ten times the engine's probability. Bucket `0` holds all
    probabilities up to 1e-6.
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
    """[K] indices of the tokens with the largest |l|, the worst first; ties in batch order; none with l = 0."""
    size = seen.log_ratio.abs()
    if seen.num_tokens == 0:
        return seen.place
    least = size.topk(min(num, seen.num_tokens)).values[-1]
    # topk chooses among ties in any order, but a resumed run must report the same tokens.
    candidates = ((size >= least) & (size > 0)).nonzero().squeeze(1)
    return candidates[size[candidates].argsort(descending=True, stable=True)[:num]]


def _table(seen: ComparedTokens) -> Tensor:
    """[3, doublings + 1, decades + 1] sum of |l|, sum of l and number of tokens, by position and probability."""
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
    return add(seen.log_ratio, bucket, num).view(3, NUM_POSITION_DOUBLINGS + 1, NUM_PROBABILITY_DECADES + 1)


def _sums(log_ratio: Tensor, bucket: Tensor, num: int) -> Tensor:
    """[3, num] sum of |l|, sum of l and number of tokens of each bucket."""
    count = torch.bincount(bucket, minlength=num).double()
    return torch.stack(
        [torch.bincount(bucket, weights=w, minlength=num) for w in (log_ratio.abs(), log_ratio)] + [count]
    )


def _sums_in_order(log_ratio: Tensor, bucket: Tensor, num: int) -> Tensor:
    """The same in a fixed order: on a GPU, sums by ids are added in any order and would differ from run to run."""
    bucket, order = bucket.sort(stable=True)
    log_ratio = log_ratio[order]
    offsets = torch.searchsorted(bucket, torch.arange(num + 1, device=bucket.device))
    sums = [contiguous_sum(values, offsets) for values in (log_ratio.abs(), log_ratio)]
    return torch.stack([*sums, offsets.diff().double()])
