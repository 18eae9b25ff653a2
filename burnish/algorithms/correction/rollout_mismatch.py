"""The gap between the policy that sampled and the policy that is trained, at the tokens the model wrote.

Everything in this package is computed from l = old_logp - behaviour_logp in float64, without gradient. A row is a
sequence with at least one such token; sequences with none are in no mean, no fraction and no count. A statistic has
one value a token [M] or one a row [R]; where those numbers are equal every row is one token long, and they are the same.

Log-probs are clamped to +-300, so that everything stays finite: a sampled token to which a broken engine gives -inf has
l of about +300, the largest weight there is, and is bounded or rejected like any other; one to which the trainer gives
-inf is vetoed; where both do, l is 0. A nan is refused, for it says that nobody reported a log-prob.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_count, contiguous_sum

MAX_ABS_LOGP = 300.0
"""Beyond this no log-prob is told apart; the exponential of the difference of two is a float64 with room to be summed."""
LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before the exponential makes a weight or a divergence of them."""


@dataclass(frozen=True)
class RolloutMismatch:
    """M tokens in R rows, none of which is empty."""

    log_ratio: Tensor  # [M] l
    offsets: Tensor  # [R+1]
    old_sum: Tensor  # [R] of the trainer's log-probs
    behaviour_sum: Tensor  # [R] of the engine's

    @property
    def num_tokens(self) -> int:
        return self.log_ratio.shape[0]

    @cached_property
    def lengths(self) -> Tensor:
        """[R] tokens of each row."""
        return self.offsets.diff()

    @cached_property
    def log_ratio_sum(self) -> Tensor:
        """[R] sum_t l."""
        return self.old_sum - self.behaviour_sum

    @cached_property
    def clamped(self) -> Tensor:
        """[M] l as weights and divergences see it."""
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio(self) -> Tensor:
        """[M] exp of the clamped l: how much likelier the trainer makes a token than the engine did."""
        return self.clamped.exp()

    @cached_property
    def k1(self) -> Tensor:
        """[M] -l, clamped like the next two."""
        return -self.clamped

    @cached_property
    def k2(self) -> Tensor:
        """[M] l^2 / 2."""
        return self.clamped**2 / 2

    @cached_property
    def k3(self) -> Tensor:
        """[M] exp(l) - 1 - l."""
        return self.ratio - 1 - self.clamped

    def mean(self, values: Tensor) -> Tensor:
        """The mean over tokens of [M], or of [R] spread over tokens, in float64."""
        if values.shape[0] == self.num_tokens:
            total = values.count_nonzero() if values.dtype == torch.bool else values.sum()
        else:
            total = (values * self.lengths).sum()
        return total.double() / self.num_tokens

    def mean_square(self, values: Tensor) -> Tensor:
        """The mean over tokens of the square."""
        return values.dot(values) / self.num_tokens if values.shape[0] == self.num_tokens else self.mean(values**2)

    def std(self, values: Tensor) -> Tensor:
        """The deviation over tokens from their mean; taken around it, so that values that are all equal have none."""
        return self.mean_square(values - self.mean(values).to(values.dtype)).sqrt()

    def rows(self, values: Tensor) -> Tensor:
        """[R] the mean over each row's tokens."""
        return (
            values if values.shape[0] == self.lengths.shape[0] else contiguous_sum(values, self.offsets) / self.lengths
        )

    def spread(self, values: Tensor) -> Tensor:
        """[M] from [M] or [R]."""
        return values if values.shape[0] == self.num_tokens else torch.repeat_interleave(values, self.lengths)

    def rows_with(self, flags: Tensor) -> Tensor:
        """[R] bool: rows with any token flagged."""
        if flags.shape[0] == self.lengths.shape[0]:
            return flags
        return contiguous_count(flags, self.offsets) > 0


def rollout_mismatch(old: Tensor, behaviour: Tensor, offsets: Tensor) -> RolloutMismatch:
    """The gap of log-probs [M] in runs of `offsets`, empty ones left out."""
    if old.shape[0] == 0:
        raise ValueError("rollout correction compares log-probs of tokens the model wrote, and the batch has none")
    offsets = offsets[torch.cat([torch.ones_like(offsets[:1], dtype=torch.bool), offsets.diff() > 0])]
    old, behaviour = (x.detach().clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double() for x in (old, behaviour))
    old_sum, behaviour_sum = contiguous_sum(old, offsets), contiguous_sum(behaviour, offsets)
    refuse_nan_logp(old_sum, behaviour_sum)
    return RolloutMismatch(old.sub_(behaviour), offsets, old_sum, behaviour_sum)


def refuse_nan_logp(old: Tensor, behaviour: Tensor) -> None:
    """Stops where a log-prob, or a sum of some, is missing."""
    for side, values in (("trainer", old), ("engine", behaviour)):
        if bool(values.isnan().any()):
            raise UserError(
                f"the {side}'s log-probs are nan in {int(values.isnan().sum())} of {values.shape[0]} places where the model wrote; "
                "rollout correction needs the log-prob of every token the model wrote from both engine and trainer"
            )


@dataclass(frozen=True)
class Written:
    """Where the tokens the model wrote are in a batch."""

    batch: Batch
    where: Tensor | None  # [M] their places, None if all tokens are
    offsets: Tensor  # [S+1] their sequences

    def column(self, name: str) -> Tensor:
        """[M] a token column at these tokens."""
        column = self.batch.token[name]
        return column if self.where is None else column.index_select(0, self.where)

    def back(self, values: Tensor) -> Tensor:
        """[N] from [M], with 0 elsewhere."""
        if self.where is None:
            return values
        return values.new_zeros(self.batch.num_tokens).index_copy_(0, self.where, values)


def written_of(batch: Batch) -> Written:
    """The tokens of `action_mask`: what the engine did does not change when a filter takes a token out of the loss."""
    mask = batch.action_mask
    if bool(mask.all()):
        return Written(batch, None, batch.offsets)
    where = mask.nonzero().squeeze(1)
    return Written(batch, where, torch.searchsorted(where, batch.offsets))
