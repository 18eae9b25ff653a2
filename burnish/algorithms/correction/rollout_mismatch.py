"""The mismatch between the engine that sampled and the trainer: log-ratios l = old_logp - behaviour_logp.

Everything in this package is computed from l in float64, without gradient, at the tokens of `action_mask`. A filter that
takes a token out of the loss does not change what the engine did, so `loss_mask` is not used. A row is a sequence with at
least one such token; sequences without one are in no mean and no count. A statistic has one value per token [M] or one
per row [R]. If M equals R, every row is one token long, and the two are the same.

Log-probs are clamped to +-300, so that everything stays finite. A sampled token to which a broken engine gives -inf has
l of about +300: it is bounded or rejected like any other. A token to which the trainer gives -inf is vetoed. If both give
-inf, l is 0. A nan is refused, because it means that a log-prob is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import ActionTokens, action_tokens
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_count, contiguous_sum, kth_smallest

MAX_ABS_LOGP = 300.0
"""Log-probs are clamped to +- this. The exponential of the difference of two can still be summed in float64."""
LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before they are exponentiated into a weight or a divergence."""


@dataclass(frozen=True)
class RolloutMismatch:
    """Log-ratios of M tokens in R non-empty rows."""

    log_ratio: Tensor  # [M] l
    offsets: Tensor  # [R+1]
    old_sum: Tensor  # [R] sum of the trainer's log-probs
    behaviour_sum: Tensor  # [R] sum of the engine's log-probs

    @property
    def num_tokens(self) -> int:
        return self.log_ratio.shape[0]

    @cached_property
    def lengths(self) -> Tensor:
        """[R] tokens in each row."""
        return self.offsets.diff()

    @cached_property
    def log_ratio_sum(self) -> Tensor:
        """[R] sum_t l."""
        return self.old_sum - self.behaviour_sum

    @cached_property
    def clamped_log_ratio(self) -> Tensor:
        """[M] clip(l, -20, 20)."""
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio(self) -> Tensor:
        """[M] exp(l) of the clamped l: pi_trainer / pi_engine."""
        return self.clamped_log_ratio.exp()

    @cached_property
    def k1(self) -> Tensor:
        """[M] -l of the clamped l."""
        return -self.clamped_log_ratio

    @cached_property
    def k2(self) -> Tensor:
        """[M] l^2 / 2 of the clamped l."""
        return self.clamped_log_ratio**2 / 2

    @cached_property
    def k3(self) -> Tensor:
        """[M] exp(l) - 1 - l of the clamped l."""
        return self.ratio - 1 - self.clamped_log_ratio

    def mean(self, values: Tensor) -> Tensor:
        """Float64 mean over tokens of [M], or of [R] with each row counted once per token."""
        if values.shape[0] == self.num_tokens:
            total = values.count_nonzero() if values.dtype == torch.bool else values.sum()
        else:
            total = (values * self.lengths).sum()
        return total.double() / self.num_tokens

    def mean_square(self, values: Tensor) -> Tensor:
        """Mean over tokens of the square."""
        return values.dot(values) / self.num_tokens if values.shape[0] == self.num_tokens else self.mean(values**2)

    def std(self, values: Tensor) -> Tensor:
        """Population standard deviation over tokens. Centring first makes it exactly 0 for equal values."""
        return self.mean_square(values - self.mean(values).to(values.dtype)).sqrt()

    def row_means(self, values: Tensor) -> Tensor:
        """[R] mean over each row's tokens."""
        return (
            values if values.shape[0] == self.lengths.shape[0] else contiguous_sum(values, self.offsets) / self.lengths
        )

    def spread(self, values: Tensor) -> Tensor:
        """[M] or [R] to [M]: a row's value is repeated at each of its tokens."""
        return values if values.shape[0] == self.num_tokens else torch.repeat_interleave(values, self.lengths)

    def any_in_row(self, flags: Tensor) -> Tensor:
        """[R] bool: whether any token of the row is flagged."""
        if flags.shape[0] == self.lengths.shape[0]:
            return flags
        return contiguous_count(flags, self.offsets) > 0


def rollout_mismatch(old: Tensor, behaviour: Tensor, offsets: Tensor) -> RolloutMismatch:
    """The mismatch of two columns of log-probs [M] in the runs of `offsets`; empty runs are left out."""
    if old.shape[0] == 0:
        raise ValueError("rollout correction compares log-probs of tokens the model wrote, and the batch has none")
    offsets = offsets[torch.cat([torch.ones_like(offsets[:1], dtype=torch.bool), offsets.diff() > 0])]
    old, behaviour = (x.detach().clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double() for x in (old, behaviour))
    old_sum, behaviour_sum = contiguous_sum(old, offsets), contiguous_sum(behaviour, offsets)
    refuse_nan_logp(old_sum, behaviour_sum)
    return RolloutMismatch(old.sub_(behaviour), offsets, old_sum, behaviour_sum)


def batch_mismatch(batch: Batch) -> tuple[ActionTokens, RolloutMismatch]:
    """The action tokens of a batch, and the mismatch of its `old_logp` and `behaviour_logp` at them."""
    tokens = action_tokens(batch)
    old, behaviour = (tokens.gather(batch.token[name]) for name in ("old_logp", "behaviour_logp"))
    return tokens, rollout_mismatch(old, behaviour, tokens.offsets)


def refuse_nan_logp(old: Tensor, behaviour: Tensor) -> None:
    """Raises if a log-prob, or a sum of log-probs, is nan."""
    for side, values in (("trainer", old), ("engine", behaviour)):
        if bool(values.isnan().any()):
            raise UserError(
                f"the {side}'s log-probs are nan in {int(values.isnan().sum())} of {values.shape[0]} places where the model wrote; "
                "rollout correction needs the log-prob of every token the model wrote from both engine and trainer"
            )


# --- Exact quantiles of any number of values, by partition instead of a full sort.


def quantiles(values: Tensor, shares: Sequence[float]) -> Tensor:
    """Quantiles of [M] at increasing `shares`, linearly interpolated between the two nearest values."""
    last = values.shape[0] - 1
    ranks = [int(share * last) for share in shares]
    pairs = _neighbours_on_cpu(values, ranks) if values.device.type == "cpu" else _neighbours_on_device(values, ranks)
    return _interpolated(pairs, values.shape[0], shares)


def row_quantiles(values: Tensor, counts: Tensor, shares: Sequence[float]) -> Tensor:
    """Quantiles of [R] values that occur `counts` times each."""
    values, order = values.sort()
    ends = counts[order].cumsum(0)
    last = int(ends[-1]) - 1
    ranks = torch.tensor([int(share * last) for share in shares], device=values.device)
    found = [values[torch.searchsorted(ends, r.clamp(max=last), right=True)] for r in (ranks, ranks + 1)]
    return _interpolated(torch.stack(found, 1), last + 1, shares)


def _neighbours_on_cpu(values: Tensor, ranks: Sequence[int]) -> Tensor:
    """[K, 2] the values of rank r and r + 1.

    Each partition works only on what is right of the previous rank, so that all ranks together cost two or three full
    partitions. torch's kthvalue is several times slower.
    """
    left, start, found = values.numpy().copy(), 0, []
    for rank in ranks:
        left[start:].partition(rank - start)
        start = rank
        above = left[rank + 1 :]
        found.append([left[rank], above.min() if above.size else left[rank]])
    return torch.tensor(found, dtype=values.dtype)


def _neighbours_on_device(values: Tensor, ranks: Sequence[int]) -> Tensor:
    """[K, 2] the same on an accelerator."""
    last = values.shape[0] - 1
    return torch.stack([torch.stack([kth_smallest(values, min(r, last)) for r in (rank, rank + 1)]) for rank in ranks])


def _interpolated(pairs: Tensor, num: int, shares: Sequence[float]) -> Tensor:
    places = torch.tensor([share * (num - 1) for share in shares], dtype=pairs.dtype, device=pairs.device)
    return pairs[:, 0] + (pairs[:, 1] - pairs[:, 0]) * places.frac()
