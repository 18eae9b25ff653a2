"""From scored rollouts to a batch the learner can use: group filters, old and reference log-probs, KL, advantages,
sample filters, weights. One function for each line of the loop, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.advantages import ADVANTAGES, place_rewards
from burnish.algorithms.aggregation import aggregation_weights
from burnish.algorithms.filters import GROUP_FILTERS, SAMPLE_FILTERS, loss_mask_from
from burnish.algorithms.kl import kl_reward
from burnish.algorithms.losses import PolicyLoss
from burnish.config.algorithm import Algorithm
from burnish.config.errors import UserError
from burnish.config.plugins import check_options, load_plugin
from burnish.config.slots import Plugin, Slot
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids
from burnish.training.learner import Learner
from burnish.training.reference import FrozenReference

NOT_OPTIONS = {"name", "options"}


def options_of(slot: Slot) -> dict[str, Any]:
    """A slot record's options as keyword arguments of its function."""
    return slot.options if isinstance(slot, Plugin) else slot.model_dump(exclude=NOT_OPTIONS)


def function_of(slot: Slot, table: dict[str, Callable[..., Any]], base: Path | None) -> Callable[..., Any]:
    """The function of a slot: ours by name, or the user's."""
    if not isinstance(slot, Plugin):
        return table[slot.name]  # type: ignore[attr-defined]
    function = load_plugin(slot.name, base)
    check_options(function, slot.options, slot.name)
    return function


class Recipe:
    """An algorithm with its functions looked up: the pure part of every step."""

    def __init__(self, algorithm: Algorithm, horizon: int, num_updates: int, base: Path | None = None) -> None:
        self.algorithm = algorithm
        self.horizon = algorithm.aggregation.horizon or horizon
        self.advantage = function_of(algorithm.advantage, ADVANTAGES, base)
        self.user_filters = [
            (f.name, function_of(f, {}, base), f.options) for f in algorithm.filters if isinstance(f, Plugin)
        ]
        self.loss = policy_loss(algorithm, base)
        # With one update a batch the policy is its own anchor; KL in the reward needs the log-probs all the same.
        self.needs_old = num_updates > 1 or algorithm.kl.reward.coef > 0
        self.needs_reference = algorithm.kl.reference != "none"

    def select(self, batch: Batch) -> Batch:
        """Group filters: only the groups worth a forward pass."""
        keep = torch.ones(batch.num_sequences, dtype=torch.bool, device=batch.tokens.device)
        for slot in self.algorithm.filters:
            if slot.name in GROUP_FILTERS:
                keep &= GROUP_FILTERS[slot.name](batch)
        return batch.select(keep.nonzero().squeeze(1))

    def prepare(
        self, batch: Batch, learner: Learner, reference: FrozenReference | None
    ) -> tuple[Batch, dict[str, float]]:
        """Old and reference log-probs where they are needed, token rewards, advantages; and what to log of it."""
        stats: dict[str, float] = {}
        if self.needs_old:
            batch = batch.with_token(old_logp=learner.logprobs(batch))
        if reference is not None:
            batch = batch.with_token(ref_logp=reference.logprobs(batch))
        rewards = place_rewards(batch)
        term = self.algorithm.kl.reward
        if term.coef > 0:
            rewards, stats["kl_reward"] = kl_reward(batch, rewards, term.estimator, term.coef)
        batch = batch.with_token(token_rewards=rewards)
        advantages = self.advantage(batch, **options_of(self.algorithm.advantage))
        return _with_advantages(batch, advantages, self.algorithm.advantage.name), stats

    def trim(self, batch: Batch) -> Batch:
        """Sample filters; sequences with nothing left in the loss go."""
        for slot in self.algorithm.filters:
            if slot.name in SAMPLE_FILTERS:
                batch = batch.with_token(loss_mask=SAMPLE_FILTERS[slot.name](batch))
        for name, function, options in self.user_filters:
            batch = batch.with_token(loss_mask=loss_mask_from(function(batch, **options), batch, name))
        left = torch.zeros_like(batch.sequence["truncated"])
        left[batch.sequence_ids[batch.loss_mask]] = True
        return batch.select(left.nonzero().squeeze(1))

    def mini_batches(self, batch: Batch, num: int, epochs: int) -> Iterator[Batch]:
        """`epochs` passes over `num` parts of nearly equal group count, weights fixed; a group is never split."""
        groups, count = compact_ids(batch.sequence["group_ids"])
        num = min(num, count)
        for _ in range(epochs):
            for k in range(num):
                part = (groups >= k * count // num) & (groups < (k + 1) * count // num)
                mini = batch.select(part.nonzero().squeeze(1))
                yield mini.with_token(weight=aggregation_weights(mini, self.algorithm.aggregation.name, self.horizon))


def policy_loss(algorithm: Algorithm, base: Path | None) -> PolicyLoss:
    """The loss record of an algorithm."""
    custom = isinstance(algorithm.loss, Plugin)
    return PolicyLoss(
        ratio=algorithm.ratio.name,
        clip=algorithm.clip.name,
        clip_options=options_of(algorithm.clip),
        loss=algorithm.loss.name,
        custom=function_of(algorithm.loss, {}, base) if custom else None,
        custom_options=options_of(algorithm.loss) if custom else {},
        kl_estimator=algorithm.kl.loss.estimator,
        kl_coef=algorithm.kl.loss.coef,
        entropy_coef=algorithm.entropy.coef,
    )


def _with_advantages(batch: Batch, advantages: Tensor, name: str) -> Batch:
    """Advantages as the column they are: one a sequence, or one a token."""
    if not isinstance(advantages, Tensor):
        raise UserError(f"advantage {name} returned {type(advantages).__name__}; expected a tensor")
    if not bool(torch.isfinite(advantages).all()):
        raise UserError(
            f"advantage {name} gave values that are not finite; rewards were {batch.sequence['reward'].tolist()[:8]}..."
        )
    if advantages.shape == (batch.num_sequences,):
        return batch.with_sequence(advantages=advantages.detach())
    if advantages.shape == (batch.num_tokens,):
        return batch.with_token(advantages=advantages.detach())
    raise UserError(
        f"advantage {name} returned shape {tuple(advantages.shape)}; expected one value a sequence [{batch.num_sequences}] or a token [{batch.num_tokens}]"
    )
