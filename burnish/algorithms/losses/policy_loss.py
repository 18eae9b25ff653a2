"""Losses as records: ratio x clip x loss with the terms beside them, and plain likelihood.

A record is picklable, says what it `needs` besides log-probs and its `scope`, and turns a view into a plain sum over
tokens, whose weights (column `weight`) were fixed on the whole mini-batch. The metrics it returns are sums too, so that
they add over micro-batches; what divides them is the number of tokens in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from burnish.algorithms.correction.corrections import bypass_correction
from burnish.algorithms.correction.weights_and_rejection import sequence_weights
from burnish.algorithms.losses.loss_functions import LOSSES
from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.policy.ratios_and_clips import CLIPS, MAX_TOKEN_LOG_RATIO, RATIOS, log_ratio, token_ratio
from burnish.algorithms.terms.loss_terms import kl_estimate, top_entropy_mask
from burnish.config.errors import UserError


class Loss(Protocol):
    """What the learner asks of a loss."""

    @property
    def needs(self) -> frozenset[str]:
        """`entropy` if it wants entropies, `kl` the exact one to the reference, `value` if it wants a critic's values."""

    @property
    def scope(self) -> str:
        """What one view must hold: `token` or `sequence` (any whole sequences), `groups` (any whole groups of sequences, over
        which loss and metrics add up), `group`, `batch` (the mini-batch)."""

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss, and sums of per-token metrics to be divided by the number of tokens in the loss."""


@dataclass(frozen=True)
class NllLoss:
    """Negative log-likelihood (supervised)."""

    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "token"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        assert view.logp is not None, "a policy's view has log-probs"
        return -(view.column("weight") * view.logp).sum(), {"nll": -view.logp.detach().sum()}


@dataclass(frozen=True)
class PolicyLoss:
    """One record for every row of the table of algorithms.

    L = sum_t weight_t (policy_t + kl_coef KL_t - entropy_coef H_t) - sum_t nll_weight_t logp_t

    Columns it reads: `weight`, `advantages`; `old_logp` if the batch is used for more than one update (without it the
    anchor is the policy itself, whose ratio is 1); `ref_logp` if `kl_coef` > 0; `nll_weight` where some tokens are also
    imitated (its weights hold their coefficient); and what the chosen clip and loss read.
    """

    ratio: str = "token"
    clip: str = "ppo"
    clip_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "surrogate"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    custom: Callable[..., Tensor] | None = None
    """A user's per-token loss, called as custom(logp, anchor, advantages, **custom_options)."""
    custom_options: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "token"
    """The widest scope of the slots above."""
    anchor: str = "old_logp"
    """The column the log-ratio is taken to; `ref_logp` where an iteration's start is the anchor (Kimi k1.5, SPPO)."""
    bypass: Mapping[str, Any] | None = None
    """Options of a correction made inside the loss, where the engine's log-probs are the anchor."""
    kl_estimator: str = "k3"
    kl_coef: float = 0.0
    kl_is_corrected: bool = False
    """Multiply the KL by the token ratio, with gradient: unbiased for samples of the old policy (2512.02556)."""
    entropy_coef: float = 0.0
    entropy_top: float | None = None
    """The policy term only at this share of tokens, those of highest entropy; denominators stay (2506.01939)."""

    @property
    def needs(self) -> frozenset[str]:
        """`kl` is the exact one to the reference, of both models in one pass."""
        return frozenset({"entropy", "kl"}) if self.uses_full_kl else frozenset({"entropy"})

    @property
    def uses_full_kl(self) -> bool:
        """Whether the KL term is the sum over the vocabulary."""
        return self.kl_coef > 0 and self.kl_estimator == "full"

    def __post_init__(self) -> None:
        if self.entropy_top is not None and self.scope != "batch":
            raise ValueError(f"the top entropies are those of the whole batch, but the scope is {self.scope}")

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        logp, entropy, weight = view.logp, view.entropy, view.column("weight")
        assert logp is not None, "a policy's view has log-probs"
        assert entropy is not None, "a policy loss needs entropies"
        anchor = view.column(self.anchor) if view.has(self.anchor) else logp.detach()
        per_token, marks = self._corrected(view, anchor, *self._policy(view, logp, anchor))
        sums = {name: _sum_metric(mark, logp.dtype) for name, mark in marks.items()}
        sums["ppo_kl"] = -self._drift(view, anchor).sum()
        sums["entropy"] = entropy.detach().sum()
        if self.entropy_top is not None:
            top = top_entropy_mask(entropy.detach(), self.entropy_top)
            per_token = torch.where(top, per_token, torch.zeros_like(per_token))
        if self.kl_coef > 0:
            kl = self._kl(view, logp)
            if self.kl_is_corrected:
                sampled = view.column("old_logp") if view.has("old_logp") else logp.detach()
                kl = token_ratio(view, sampled) * kl
            per_token = per_token + self.kl_coef * kl
            sums["kl_ref"] = kl.detach().sum()
        if self.entropy_coef > 0:
            per_token = per_token - self.entropy_coef * entropy
        total = (weight * per_token).sum()
        if view.has("nll_weight"):
            total = total - (view.column("nll_weight") * logp).sum()
        return total, sums

    def _kl(self, view: LossView, logp: Tensor) -> Tensor:
        """[M] the KL to the reference at each token, estimated or exact."""
        if self.uses_full_kl:
            assert view.kl is not None, "the learner gives what the loss needs"
            return view.kl
        return kl_estimate(logp, view.column("ref_logp"), self.kl_estimator)

    def _policy(self, view: LossView, logp: Tensor, anchor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[M] the policy's loss at each token, and the marks of clip and loss."""
        advantages = view.column("advantages")
        if self.custom is not None:
            return _checked_user_loss(self.custom(logp, anchor, advantages, **self.custom_options), logp), {}
        loss_of = LOSSES[self.loss]
        if loss_of is not None:
            return loss_of(view, anchor, advantages, **self.loss_options)
        ratio_of = RATIOS[self.ratio]
        assert ratio_of is not None, f"loss {self.loss} has a ratio: the config refuses the other case"
        clipped, marks = CLIPS[self.clip](view, ratio_of(view, anchor), advantages, anchor, **self.clip_options)
        if self.loss == "surrogate":
            return clipped, marks
        return -clipped * advantages * logp, marks

    def _corrected(
        self, view: LossView, anchor: Tensor, per_token: Tensor, marks: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy's loss, corrected for the gap between engine and trainer: weights made before, or here (bypass)."""
        if self.bypass is not None:
            corrected, more = bypass_correction(view, anchor, view.column("advantages"), per_token, **self.bypass)
            return corrected, marks | more
        if not view.has("rollout_weight"):
            return per_token, marks
        weight = view.column("rollout_weight")
        if self.clip == "log_geo":  # a mean of log-ratios takes the mean of log-weights
            weight = view.spread(sequence_weights(weight, view.offsets))
        return per_token * weight, marks

    def _drift(self, view: LossView, anchor: Tensor) -> Tensor:
        """[M] the log-ratio for the metrics: as the loss sees it, clamped where it has a token ratio."""
        with torch.no_grad():
            drift = log_ratio(view, anchor)
            bounded = self.ratio == "token" or self.loss == "mixed_offpolicy"
            return drift.clamp_(-MAX_TOKEN_LOG_RATIO, MAX_TOKEN_LOG_RATIO) if bounded else drift


def _sum_metric(mark: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a column of numbers, or how often one of truths is True."""
    return (mark.count_nonzero() if mark.dtype == torch.bool else mark.sum()).to(dtype)


def _checked_user_loss(per_token: object, logp: Tensor) -> Tensor:
    """A user's loss, if it has one number a token; another shape would broadcast into something else without a word."""
    if isinstance(per_token, Tensor) and per_token.shape == logp.shape:
        return per_token
    given = f"shape {tuple(per_token.shape)}" if isinstance(per_token, Tensor) else type(per_token).__name__
    raise UserError(f"the loss of your own returned {given}; expected one number a token, {tuple(logp.shape)}")
