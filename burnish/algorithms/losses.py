"""Losses as records: what a learner differentiates, and what it must provide for that.

A loss is picklable, states what it `needs` besides log-probs, and turns the outputs of one micro-batch into a plain
sum over tokens, whose weights (`weight` column) were fixed on the whole mini-batch. The metrics it returns are sums
too, named with what divides them, so that they add over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from burnish.algorithms.kl import kl_estimate
from burnish.algorithms.policy import CLIPS, RATIOS, logprob_loss


@dataclass(frozen=True)
class Outputs:
    """What the model says about the tokens in the loss of one micro-batch; all [M]."""

    logp: Tensor
    entropy: Tensor | None


class Loss(Protocol):
    """What the learner asks of a loss."""

    @property
    def needs(self) -> frozenset[str]:
        """`entropy` if it wants entropies."""

    def __call__(self, outputs: Outputs, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss, and sums of per-token metrics to be divided by the number of tokens in the loss."""


@dataclass(frozen=True)
class NllLoss:
    """Negative log-likelihood (supervised)."""

    needs: frozenset[str] = frozenset()

    def __call__(self, outputs: Outputs, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(columns["weight"] * outputs.logp).sum()
        return loss, {"nll": -outputs.logp.detach().sum()}


@dataclass(frozen=True)
class PolicyLoss:
    """ratio x clip x loss, plus KL and entropy terms: one record for every policy-gradient row of the table.

    Columns it reads, [M] each: `weight`, `advantages`; `old_logp` if the batch is used for more than one update
    (without it the anchor is the policy itself, whose ratio is 1); `ref_logp` if `kl_coef` > 0.
    """

    ratio: str = "token"
    clip: str = "ppo"
    clip_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "surrogate"
    custom: Callable[..., Tensor] | None = None
    """A user's per-token loss, called as custom(logp, anchor, advantages, **custom_options)."""
    custom_options: Mapping[str, Any] = field(default_factory=dict)
    kl_estimator: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def __call__(self, outputs: Outputs, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logp, weight, advantages = outputs.logp, columns["weight"], columns["advantages"]
        anchor = columns["old_logp"] if "old_logp" in columns else logp.detach()
        per_token, marks = self._policy(logp, anchor, advantages)
        sums = {name: mark.to(logp.dtype).sum() for name, mark in marks.items()}
        sums["ppo_kl"] = (anchor - logp.detach()).clamp(-20, 20).sum()
        if self.kl_coef > 0:
            kl = kl_estimate(logp, columns["ref_logp"], self.kl_estimator)
            per_token = per_token + self.kl_coef * kl
            sums["kl_ref"] = kl.detach().sum()
        if outputs.entropy is not None:
            sums["entropy"] = outputs.entropy.detach().sum()
            if self.entropy_coef > 0:
                per_token = per_token - self.entropy_coef * outputs.entropy
        return (weight * per_token).sum(), sums

    def _policy(self, logp: Tensor, anchor: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.custom is not None:
            return self.custom(logp, anchor, advantages, **self.custom_options), {}
        if self.loss == "logprob":
            return logprob_loss(logp, advantages), {}
        ratio_of = RATIOS[self.ratio]
        assert ratio_of is not None, "a surrogate loss has a ratio: the config refuses the other case"
        return CLIPS[self.clip](ratio_of(logp, anchor), advantages, **self.clip_options)


LOSSES = ("surrogate", "logprob")
