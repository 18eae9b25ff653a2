"""The loss records that the learner calls: the policy loss made of the slots, and plain likelihood.

A record is picklable. It states what it `needs` besides log-probs and its `scope`, and turns a view into a sum over
tokens. The weights of the sum (column `weight`) are fixed on the whole mini-batch. Metrics are sums too, so they add over
micro-batches; the learner divides them by the number of tokens in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from burnish.algorithms.correction.corrections import bypass_accepted_tokens, bypass_correction
from burnish.algorithms.correction.spec import BypassCorrection
from burnish.algorithms.correction.weights_and_rejection import sequence_weights
from burnish.algorithms.losses.loss_functions import LOSSES
from burnish.algorithms.losses.loss_view import LossView, TokenLoss
from burnish.algorithms.losses.ratios_and_clips import (
    CLIPS,
    RATIOS,
    ROLLOUT_WEIGHT,
    clamp_token_log_ratio,
    log_ratio,
    token_ratio,
)
from burnish.algorithms.losses.spec import CLIP_RECORDS, LOSS_RECORDS
from burnish.algorithms.terms.loss_terms import kl_estimate, top_entropy_mask
from burnish.config.errors import UserError
from burnish.config.records import default_options

CLIP_DEFAULTS = default_options(*CLIP_RECORDS)
LOSS_DEFAULTS = default_options(*LOSS_RECORDS)
BYPASS_DEFAULTS = default_options(BypassCorrection)["bypass"]


class Loss(Protocol):
    """What the learner asks of a loss."""

    @property
    def needs(self) -> frozenset[str]:
        """Inputs besides log-probs: `entropy`, `kl` (the exact KL to the reference), `value` (a critic's values).

        With `observations` the learner adds the NLL of observed tokens, if the mini-batch has weights for them (`terms/observations.py`).
        """

    @property
    def scope(self) -> str:
        """What one view must hold.

        - `token` or `sequence`: any set of whole sequences. For `sequence`, trajectories of several sequences make it `groups`.
        - `groups`: any set of whole groups. Loss and metrics of the groups add up.
        - `group` or `batch`: the whole mini-batch.
        """

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss, and sums of token metrics."""


@dataclass(frozen=True)
class NllLoss:
    """L = -sum_t weight_t logp_t: negative log-likelihood, for supervised training."""

    gate: str = "none"
    """A further weight of each token, with p = exp(logp) and without gradient: phi is p (1 - p), importance is p (CHORD, Trinity-RFT)."""
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "token"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        logp, weight = view.policy_logp, view.column("weight")
        if self.gate != "none":
            p = logp.detach().exp()
            weight = weight * (p * (1 - p) if self.gate == "phi" else p)
        return -(weight * logp).sum(), {"nll": -logp.detach().sum()}


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of any preset or combination of slots.

        L = sum_t weight_t (policy_t + kl_coef KL_t - entropy_coef H_t) - sum_t nll_weight_t logp_t

    A token that the correction `bypass` rejects has none of these terms, and takes no part in the ratio of its sequence. The weights
    still count it.

    Columns it reads, besides those of the chosen clip and loss:

    - `weight` and `advantages`.
    - `old_logp`. Without this column the policy itself is the anchor, and the ratio is 1 (one update per batch).
    - `ref_logp` if `kl_coef` > 0.
    - `nll_weight` if some tokens are also imitated. It includes the coefficient.

    Options that are not given have the defaults of the records.
    """

    ratio: str = "token"
    clip: str = "ppo"
    clip_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "surrogate"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    custom: Callable[..., Tensor] | None = None
    """A user's loss per token, called as custom(logp, anchor, advantages, **custom_options)."""
    custom_options: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "token"
    """The widest scope of the slots above."""
    anchor: str = "old_logp"
    """Column of the anchor's log-probs; `ref_logp` if the anchor is the start of an iteration (Kimi k1.5, SPPO)."""
    bypass: Mapping[str, Any] | None = None
    """Options of `bypass_correction`, with the engine's log-probs as the anchor; None applies no such correction."""
    kl_estimator: str = "k3"
    kl_coef: float = 0.0
    kl_clamp: float | None = None
    """Clamp each token's KL to +- this before it is weighted; None does not clamp."""
    kl_is_corrected: bool = False
    """Multiply the KL by the token ratio, with gradient: unbiased for samples of the old policy (2512.02556)."""
    entropy_coef: float = 0.0
    entropy_top: float | None = None
    """Keep the policy term only at this share of the tokens, those of highest entropy; denominators count all tokens (2506.01939)."""
    observes: bool = False
    """Whether the learner adds the NLL of what the environment said (ECHO)."""

    @property
    def needs(self) -> frozenset[str]:
        found = {"entropy", "kl"} if self.uses_full_kl or self.uses_divergence else {"entropy"}
        return frozenset(found | {"observations"} if self.observes else found)

    @property
    def uses_full_kl(self) -> bool:
        """Whether the KL term is the sum over the vocabulary."""
        return self.kl_coef > 0 and self.kl_estimator == "full"

    @property
    def uses_divergence(self) -> bool:
        """Whether the loss is a divergence over the vocabulary, which takes the place of the KL among the outputs."""
        return self.loss == "gold" or (
            self.loss == "divergence" and self.loss_options.get("support", "full") != "sampled"
        )

    @property
    def reads_author_logp(self) -> bool:
        """Whether the loss reads the column `author_logp`."""
        return self.loss == "teacher_surrogate" or self.loss_options.get("weight") == "author"

    def __post_init__(self) -> None:
        if self.entropy_top is not None and self.scope != "batch":
            raise ValueError(f"the top entropies are those of the whole batch, but the scope is {self.scope}")

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        logp, entropy, weight = view.policy_logp, view.entropy, view.column("weight")
        assert entropy is not None, "a policy loss needs entropies"
        anchor = view.column(self.anchor) if view.has(self.anchor) else logp.detach()
        accepted = self._accepted(view, anchor)
        per_token, metrics = self._corrected(view, anchor, *self._policy_of(view, anchor, accepted))
        sums = {name: _sum_metric(metric, logp.dtype) for name, metric in metrics.items()}
        sums["ppo_kl"] = -self._logged_log_ratio(view, anchor).sum()
        sums["entropy"] = entropy.detach().sum()
        if self.entropy_top is not None:
            top = _top_entropy(entropy.detach(), self.entropy_top, accepted)
            per_token = torch.where(top, per_token, torch.zeros_like(per_token))
        if self.kl_coef > 0:
            kl = self._kl(view, logp)
            if self.kl_clamp is not None:
                kl = kl.clamp(-self.kl_clamp, self.kl_clamp)
            if self.kl_is_corrected:
                old = view.column("old_logp") if view.has("old_logp") else logp.detach()
                kl = token_ratio(view, old) * kl
            per_token = per_token + self.kl_coef * kl
            sums["kl_ref"] = kl.detach().sum()
        if self.entropy_coef > 0:
            per_token = per_token - self.entropy_coef * entropy
        per_token = weight * per_token
        if view.has("nll_weight"):
            per_token = per_token - view.column("nll_weight") * logp
        return (per_token if accepted is None else per_token.masked_fill(~accepted, 0)).sum(), sums

    def _accepted(self, view: LossView, anchor: Tensor) -> Tensor | None:
        """[M] bool: the tokens that the correction `bypass` accepts; None if it rejects none."""
        reject = (self.bypass or {}).get("reject")
        return bypass_accepted_tokens(view, anchor, reject) if reject and view.num_tokens else None

    def _policy_of(self, view: LossView, anchor: Tensor, accepted: Tensor | None) -> TokenLoss:
        """`_policy` of the accepted tokens, as if the others were not in the loss; 0 at the others."""
        if accepted is None:
            return self._policy(view, anchor)
        per_token, metrics = self._policy(view.select(accepted), anchor[accepted])
        columns = {
            name: torch.zeros_like(accepted, dtype=m.dtype).masked_scatter(accepted, m) for name, m in metrics.items()
        }
        return torch.zeros_like(view.policy_logp).masked_scatter(accepted, per_token), columns

    def _kl(self, view: LossView, logp: Tensor) -> Tensor:
        """[M] KL to the reference at each token, estimated or exact."""
        if self.uses_full_kl:
            assert view.kl is not None, "the learner gives what the loss needs"
            return view.kl
        return kl_estimate(logp, view.column("ref_logp"), self.kl_estimator)

    def _policy(self, view: LossView, anchor: Tensor) -> TokenLoss:
        """[M] policy loss of each token, and the token metrics of clip and loss."""
        logp, advantages = view.policy_logp, view.column("advantages")
        if self.custom is not None:
            return _checked_user_loss(self.custom(logp, anchor, advantages, **self.custom_options), logp), {}
        loss_function = LOSSES[self.loss]
        if loss_function is not None:
            return loss_function(view, anchor, advantages, **{**LOSS_DEFAULTS[self.loss], **self.loss_options})
        ratio_function = RATIOS[self.ratio]
        assert ratio_function is not None, f"loss {self.loss} has a ratio: the config refuses the other case"
        options = {**CLIP_DEFAULTS[self.clip], **self.clip_options}
        clipped, metrics = CLIPS[self.clip](view, ratio_function(view, anchor), advantages, anchor, **options)
        if self.loss == "surrogate":
            return clipped, metrics
        return -clipped * advantages * logp, metrics

    def _corrected(self, view: LossView, anchor: Tensor, per_token: Tensor, metrics: dict[str, Tensor]) -> TokenLoss:
        """The policy loss with rollout correction: by weights computed before, or here (bypass)."""
        if self.bypass is not None:
            options = {**BYPASS_DEFAULTS, **self.bypass}
            corrected, more = bypass_correction(view, anchor, view.column("advantages"), per_token, **options)
            return corrected, metrics | more
        if not view.has(ROLLOUT_WEIGHT) or self.clip == "gamma":  # the weights are part of the ratio of `gamma_clip`
            return per_token, metrics
        weight = view.column(ROLLOUT_WEIGHT)
        if self.clip == "log_geo":  # a loss of mean log-ratios takes the mean log-weight
            weight = view.spread(sequence_weights(weight, view.offsets))
        return per_token * weight, metrics

    def _logged_log_ratio(self, view: LossView, anchor: Tensor) -> Tensor:
        """[M] the log-ratio for metrics; clamped if the loss uses a token ratio, which is clamped too."""
        with torch.no_grad():
            log_ratios = log_ratio(view, anchor)
            is_clamped = self.ratio == "token" or self.loss == "mixed_offpolicy"
            return clamp_token_log_ratio(log_ratios) if is_clamped else log_ratios


def _sum_metric(metric: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a column of numbers, or the number of True; a float64 column, which may exceed float32, stays float64."""
    return metric.count_nonzero().to(dtype) if metric.dtype == torch.bool else metric.sum()


def _top_entropy(entropy: Tensor, share: float, accepted: Tensor | None) -> Tensor:
    """[M] bool: the accepted tokens whose entropy is in the top `share` of the accepted tokens."""
    if accepted is None:
        return top_entropy_mask(entropy, share)
    return torch.zeros_like(accepted).masked_scatter(accepted, top_entropy_mask(entropy[accepted], share))


def _checked_user_loss(per_token: object, logp: Tensor) -> Tensor:
    """A user's loss if it has one number per token. Another shape would broadcast without an error."""
    if isinstance(per_token, Tensor) and per_token.shape == logp.shape:
        return per_token
    given = f"shape {tuple(per_token.shape)}" if isinstance(per_token, Tensor) else type(per_token).__name__
    raise UserError(f"the plug-in loss returned {given}; expected one number per token, {tuple(logp.shape)}")
