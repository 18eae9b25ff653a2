"""Slot `correction`: rollout correction of the mismatch between the engine's policy, which sampled, and the trainer's policy.

`coupled_correction` and `decoupled_correction` run once per batch, before advantages. `budget_correction` does too: it
chooses the mildest decoupled correction that keeps to a budget. `bypass_correction` runs inside the loss.

- Coupled: one weight per token or row; the same bounds truncate or reject it. Its metrics are under `mismatch/`.
- Decoupled: weights and rejection are separate, each with its own bounds. Its metrics are under `rollout_corr/`. There are
  three policies: engine, trainer before the first update (the anchor of the clip) and current policy. The correction covers
  engine to anchor, the clip covers anchor to current policy. Decoupled PPO (2110.00641).
- Bypass: two policies. The engine's log-probs are the anchor, and the trainer's before the update are never computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from burnish.algorithms.correction.budget import BudgetState, MismatchBudget, budget_step
from burnish.algorithms.correction.mismatch_diagnostics import chi_square_metrics, divergence_metrics
from burnish.algorithms.correction.rollout_mismatch import (
    RolloutMismatch,
    batch_mismatch,
    quantiles,
    rollout_mismatch,
    row_quantiles,
)
from burnish.algorithms.correction.spec import CoupledCorrection
from burnish.algorithms.correction.weights_and_rejection import (
    Bounds,
    CorrectionResult,
    accepted_tokens,
    accepted_tokens_with_metrics,
    batch_normalised,
    bound_weights,
    is_outside,
    metrics_to_floats,
    raw_weights,
    threshold_band,
    weight_dtype,
    weight_metrics,
    with_prefix,
)
from burnish.algorithms.losses.loss_view import LossView, TokenLoss
from burnish.config.records import slot_options
from burnish.core.batch import Batch

METRIC_PREFIX = "rollout_corr/"
"""Prefix of the metrics of decoupled, bypass and budget corrections."""
PERCENTILES = {"p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95, "p99": 0.99}


# --- Coupled


def coupled_correction(
    batch: Batch,
    *,
    apply: bool,
    threshold: float,
    lower: float | None,
    level: Literal["token", "sequence", "geometric"],
    mode: Literal["truncate", "mask"],
    veto: float | None,
    target: Literal["weight", "mask"],
) -> CorrectionResult:
    """W = exp(clip(u, -20, 20)) with l = old_logp - behaviour_logp, bounded, masked and vetoed.

    u is l (`level` token), sum_t l (sequence) or mean_t l (geometric). With `mode` truncate the weight is min(W, threshold).
    With `mode` mask it is W if lower <= W <= threshold, else the token or row is rejected; `lower` None is 1 / threshold.
    A row with any token of exp(l) < `veto` is rejected at every level.

    A rejected token has weight 0. With `target` weight the loss's denominators still count it; with `target` mask it also
    leaves `keep`. With `apply` false there are only metrics. Metrics are of W before any bound.
    verl's rollout importance sampling (PR 3694); TIS: Yao et al. (2025); MIS: Liu et al. (2025).
    """
    tokens, mismatch = batch_mismatch(batch)
    log_weights, raw = raw_weights(mismatch, level)
    band = (1 / threshold if lower is None else lower, threshold)
    catastrophic = _catastrophic_tokens(mismatch, veto)
    vetoed = mismatch.any_in_row(catastrophic)
    masked = is_outside(raw, *band) if mode == "mask" else None
    metrics = {
        "rollout_is_veto_fraction": vetoed.double().mean(),
        "rollout_is_catastrophic_token_fraction": mismatch.mean(catastrophic),
        **with_prefix("rollout_is_", weight_metrics(mismatch, level, log_weights, raw, raw, band, floor=band[0])),
        **with_prefix("rollout_is_", _percentiles(mismatch, raw)),
        **with_prefix("mismatch_", divergence_metrics(mismatch)),
    }
    if masked is not None:
        metrics["rollout_is_masked_fraction"] = mismatch.mean(masked)
        metrics["rollout_is_seq_masked_fraction"] = mismatch.any_in_row(masked).double().mean()
    numbers = metrics_to_floats("mismatch/", metrics)
    if not apply:
        return CorrectionResult(None, batch.action_mask, numbers)
    rejected = _rejected_tokens(mismatch, masked, vetoed)
    weights = mismatch.spread(raw.clamp(max=threshold)).masked_fill(rejected, 0.0)
    keep = tokens.scatter(~rejected) if target == "mask" else batch.action_mask
    return CorrectionResult(tokens.scatter(weights.to(weight_dtype(batch))), keep, numbers)


def no_correction(batch: Batch) -> CorrectionResult:
    """Metrics only: the coupled correction with its defaults, not applied."""
    return coupled_correction(batch, **slot_options(CoupledCorrection(apply=False)))


def _catastrophic_tokens(mismatch: RolloutMismatch, veto: float | None) -> Tensor:
    """[M] bool: exp(l) < veto, tokens that are much less likely under the trainer than under the engine."""
    return mismatch.log_ratio < (math.log(veto) if veto is not None else -math.inf)


def _rejected_tokens(mismatch: RolloutMismatch, masked: Tensor | None, vetoed: Tensor) -> Tensor:
    """[M] bool: tokens that are masked, or in a vetoed row."""
    if masked is None:
        return mismatch.spread(vetoed)
    if masked.shape == vetoed.shape:
        return mismatch.spread(masked | vetoed)
    return masked | mismatch.spread(vetoed)


def _percentiles(mismatch: RolloutMismatch, raw: Tensor) -> dict[str, Tensor]:
    shares = list(PERCENTILES.values())
    if raw.shape[0] == mismatch.num_tokens:
        found = quantiles(raw, shares)
    else:
        found = row_quantiles(raw, mismatch.lengths, shares)
    return dict(zip(PERCENTILES, found, strict=True))


# --- Decoupled


def decoupled_correction(
    batch: Batch,
    *,
    weights: Literal["token", "sequence"] | None,
    threshold: Bounds,
    batch_normalise: bool,
    reject: Mapping[str, Bounds],
) -> CorrectionResult:
    """Weights W = exp(clip(u, -20, 20)), u = l or sum_t l, and the tokens that every option of `reject` accepts.

    l = old_logp - behaviour_logp. With one `threshold` C the weight is min(W, C) (TIS). With two it is W inside
    [low, high] and 0 outside, and the token is still counted (IcePop). `batch_normalise` divides the weights by their mean
    over tokens (`weights` token) or rows (sequence), as the last step. The mean and the metrics cover every action token,
    rejected or not. TIS: Yao et al. (2025); MIS: Liu et al. (2025); IcePop (2510.18855).
    """
    tokens, mismatch = batch_mismatch(batch)
    metrics = {**divergence_metrics(mismatch), **chi_square_metrics(mismatch)}
    applied = None
    if weights is not None:
        found, metrics_of_weights = _importance_weights(mismatch, weights, threshold, batch_normalise)
        applied = tokens.scatter(mismatch.spread(found).to(weight_dtype(batch)))
        metrics |= with_prefix("rollout_is_", metrics_of_weights)
    keep = batch.action_mask
    if reject:
        accepted, metrics_of_rejection = accepted_tokens_with_metrics(mismatch, reject)
        keep = tokens.scatter(accepted)
        metrics |= metrics_of_rejection
    return CorrectionResult(applied, keep, metrics_to_floats(METRIC_PREFIX, metrics))


def _importance_weights(
    mismatch: RolloutMismatch, level: str, threshold: Bounds, batch_normalise: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights to apply, and metrics of them before normalisation."""
    log_weights, raw = raw_weights(mismatch, level)
    applied, band = bound_weights(raw, threshold), threshold_band(threshold)
    metrics = weight_metrics(mismatch, level, log_weights, raw, applied, band, floor=0.0)
    if isinstance(threshold, tuple):
        metrics["oob_ratio"] = mismatch.mean(is_outside(raw, *band))
    if batch_normalise:
        applied, metrics["batch_norm_factor"] = batch_normalised(mismatch, applied, level)
    return applied, metrics


# --- Budget


def budget_correction(
    batch: Batch, state: BudgetState | None, *, k3_kl: float | None, ess: float | None
) -> tuple[CorrectionResult, BudgetState, str]:
    """The decoupled correction of the rung that the controller of `budget.py` chooses for a batch.

    Also returns the controller's next state, and why the rung changed (the empty string if it did not).
    """
    state, rung, why = budget_step(state or BudgetState(), batch, MismatchBudget(k3_kl, ess))
    found = decoupled_correction(batch, **rung.options)
    metrics = {**found.metrics, f"{METRIC_PREFIX}budget_rung": float(state.rung)}
    return replace(found, metrics=metrics), state, why


# --- Bypass


def bypass_accepted_tokens(view: LossView, anchor: Tensor, reject: Mapping[str, Bounds]) -> Tensor:
    """[M] bool: tokens within the bounds of every option of `reject`, with l = sg(logp) - anchor."""
    return accepted_tokens(rollout_mismatch(view.policy_logp, anchor, view.offsets), reject)


def bypass_correction(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    surrogate: Tensor | None,
    *,
    loss: Literal["ppo_clip", "reinforce"],
    weights: Literal["token", "sequence"] | None,
    threshold: Bounds,
    batch_normalise: bool,
    reject: Mapping[str, Bounds],
) -> TokenLoss:
    """[M] the loss of each token with the engine's log-probs as `anchor`, 0 if rejected; and token metrics.

    - `loss` ppo_clip returns `surrogate`, the loss of the slots ratio and clip. Its ratio to that anchor is the correction
      already, so weights are only logged. The ratio of a sequence is over its accepted tokens (`bypass_accepted_tokens`).
    - `loss` reinforce returns -sg(w) A logp and does not read `surrogate`. w = exp(clip(u, -20, 20)) is bounded by
      `threshold`, with u = l or sum_t l and l = sg(logp) - anchor; w is 1 if `weights` is None.

    The weights exist only once the current policy's log-probs do, so they are computed here, without gradient. The
    denominators (column `weight`) are fixed before that and count rejected tokens: the gradient does not depend on how a
    mini-batch is split. `batch_normalise` uses the mean weight of the view, which then must hold the whole mini-batch.
    """
    if view.num_tokens == 0:
        return view.policy_logp * 0, {}
    mismatch = rollout_mismatch(view.policy_logp, anchor, view.offsets)
    level = weights or "token"
    _, raw = raw_weights(mismatch, level)
    applied = bound_weights(raw, threshold)
    metrics = _bypass_token_metrics(mismatch, level, raw, applied, threshold)
    if loss == "reinforce":
        if batch_normalise and weights is not None:
            applied, _ = batch_normalised(mismatch, applied, weights)
        factor = mismatch.spread(applied).to(view.policy_logp.dtype) if weights is not None else 1.0
        per_token = -factor * advantages * view.policy_logp
    else:
        assert surrogate is not None, "ppo_clip is the loss of the slots ratio and clip"
        per_token = surrogate
    if reject:
        accepted = accepted_tokens(mismatch, reject)
        per_token = per_token.masked_fill(~accepted, 0.0)
        metrics[f"{METRIC_PREFIX}rollout_rs_masked_fraction"] = ~accepted
    return per_token, metrics


def _bypass_token_metrics(
    mismatch: RolloutMismatch, level: str, raw: Tensor, applied: Tensor, threshold: Bounds
) -> dict[str, Tensor]:
    """Columns [M] whose means over all tokens of a mini-batch are the metrics of that name.

    Metrics that are not means over tokens (std, extremes, rows) would depend on the split and are left out. k3 is of l itself, as in
    `divergence_metrics`: these columns are float64 and are summed in it.
    """
    low, high = threshold_band(threshold)
    found = {
        "kl": -mismatch.log_ratio,
        "k3_kl": mismatch.log_ratio.exp() - 1 - mismatch.log_ratio,
        "chi2_token": mismatch.ratio**2 - 1,
        "rollout_is_mean": mismatch.spread(applied),
    }
    if level == "token":
        found |= {"rollout_is_ratio_fraction_high": raw > high, "rollout_is_ratio_fraction_low": raw < low}
    return {METRIC_PREFIX + name: column for name, column in found.items()}


CORRECTIONS: dict[str, Callable[..., Any]] = {
    "none": no_correction,
    "seed": coupled_correction,  # `seed` is its name in configs
    "decoupled": decoupled_correction,
    "bypass": bypass_correction,
    "budget": budget_correction,
}
"""The function of each choice of `algorithm.correction`."""
