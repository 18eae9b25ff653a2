"""Rollout correction, first form: one weight that is bounded, masked and vetoed, and its report under `mismatch/`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from burnish.algorithms.correction.mismatch_diagnostics import chi_square_metrics, divergence_metrics
from burnish.algorithms.correction.mismatch_profiles import quantiles, row_quantiles
from burnish.algorithms.correction.rollout_mismatch import RolloutMismatch, rollout_mismatch, written_of
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
from burnish.algorithms.losses.loss_view import LossView
from burnish.core.batch import Batch

PERCENTILES = {"p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95, "p99": 0.99}


def coupled_correction(
    batch: Batch,
    apply: bool = True,
    threshold: float = 2.0,
    lower: float | None = None,
    level: str = "token",
    mode: str = "truncate",
    veto: float | None = 1e-4,
    target: str = "weight",
) -> CorrectionResult:
    """W = exp(clip(u, -20, 20)), u = l of the token, its sum or its mean over the row, l = old_logp - behaviour_logp.

    mode truncate: min(W, threshold). mode mask: W where lower <= W <= threshold (lower None: 1/threshold), else rejected.
    A row with any token of exp(l) < veto is rejected, whatever the level. What is rejected has weight 0 and, with target
    `weight`, is still counted in the loss's denominators; with target `mask` it is taken out of `keep` too. Not applied,
    there are only metrics. They are those of W before any bound. Reads `old_logp` and `behaviour_logp` at `action_mask`.
    verl's rollout importance sampling (PR 3694); TIS and MIS: Yao et al. and Liu et al. (2025).
    """
    written = written_of(batch)
    gap = rollout_mismatch(written.column("old_logp"), written.column("behaviour_logp"), written.offsets)
    log_weights, raw = raw_weights(gap, level)
    band = (1 / threshold if lower is None else lower, threshold)
    catastrophic = _catastrophic_tokens(gap, veto)
    vetoed = gap.rows_with(catastrophic)
    masked = is_outside(raw, *band) if mode == "mask" else None
    metrics = {
        "rollout_is_veto_fraction": vetoed.double().mean(),
        "rollout_is_catastrophic_token_fraction": gap.mean(catastrophic),
        **with_prefix("rollout_is_", weight_metrics(gap, level, log_weights, raw, raw, band, floor=band[0])),
        **with_prefix("rollout_is_", _percentiles(gap, raw)),
        **with_prefix("mismatch_", divergence_metrics(gap)),
    }
    if masked is not None:
        metrics["rollout_is_masked_fraction"] = gap.mean(masked)
        metrics["rollout_is_seq_masked_fraction"] = gap.rows_with(masked).double().mean()
    numbers = metrics_to_floats("mismatch/", metrics)
    if not apply:
        return CorrectionResult(None, batch.action_mask, numbers)
    rejected = _rejected_tokens(gap, masked, vetoed)
    weights = gap.spread(raw.clamp(max=threshold)).masked_fill(rejected, 0.0)
    keep = written.back(~rejected) if target == "mask" else batch.action_mask
    return CorrectionResult(written.back(weights.to(weight_dtype(batch))), keep, numbers)


def no_correction(batch: Batch) -> CorrectionResult:
    """Nothing is corrected: the report alone, with a bound of 2 where a metric needs one."""
    return coupled_correction(batch, apply=False)


def _catastrophic_tokens(gap: RolloutMismatch, veto: float | None) -> Tensor:
    """[M] bool: tokens the trainer finds all but impossible."""
    return gap.log_ratio < (math.log(veto) if veto is not None else -math.inf)


def _rejected_tokens(gap: RolloutMismatch, masked: Tensor | None, vetoed: Tensor) -> Tensor:
    """[M] bool."""
    if masked is None:
        return gap.spread(vetoed)
    if masked.shape == vetoed.shape:
        return gap.spread(masked | vetoed)
    return masked | gap.spread(vetoed)


def _percentiles(gap: RolloutMismatch, raw: Tensor) -> dict[str, Tensor]:
    shares = list(PERCENTILES.values())
    if raw.shape[0] == gap.num_tokens:
        found = quantiles(raw, shares)
    else:
        found = row_quantiles(raw, gap.lengths, shares)
    return dict(zip(PERCENTILES, found, strict=True))


# --- Rollout correction, second form: weights and rejection apart, each with its own bounds; the report is `rollout_corr/`.
#
# Decoupled: three policies, with the trainer's before the first update as the anchor of the clip. The gap from engine to
# anchor is corrected here, the drift from anchor to the current policy by the clip. Decoupled PPO (2110.00641).

METRIC_PREFIX = "rollout_corr/"


def decoupled_correction(
    batch: Batch,
    weights: str | None = None,
    threshold: Bounds = 2.0,
    batch_normalise: bool = False,
    reject: Mapping[str, Bounds] | None = None,
) -> CorrectionResult:
    """Weights of each token or sequence (or none), and the tokens that every option of `reject` keeps.

    W = exp(clip(u, -20, 20)), u = l of the token or its sum over the row, l = old_logp - behaviour_logp. One threshold C:
    min(W, C). Two: W inside [low, high], else 0, the token still counted. `batch_normalise` divides what is applied by its
    mean over tokens (weights token) or rows (sequence), last. Metrics and the mean are taken over everything the model
    wrote, rejected or not. Reads `old_logp` and `behaviour_logp` at `action_mask`. TIS: Yao et al. (2025); MIS: Liu et al.
    (2025); IcePop (2510.18855).
    """
    written = written_of(batch)
    gap = rollout_mismatch(written.column("old_logp"), written.column("behaviour_logp"), written.offsets)
    metrics = {**divergence_metrics(gap), **chi_square_metrics(gap)}
    applied = None
    if weights is not None:
        found, said = _importance_weights(gap, weights, threshold, batch_normalise)
        applied = written.back(gap.spread(found).to(weight_dtype(batch)))
        metrics |= with_prefix("rollout_is_", said)
    keep = batch.action_mask
    if reject:
        inside, said = accepted_tokens_with_metrics(gap, reject)
        keep = written.back(inside)
        metrics |= said
    return CorrectionResult(applied, keep, metrics_to_floats(METRIC_PREFIX, metrics))


def _importance_weights(
    gap: RolloutMismatch, level: str, threshold: Bounds, batch_normalise: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights that are applied, and what is said of them before they are normalised."""
    log_weights, raw = raw_weights(gap, level)
    applied, band = bound_weights(raw, threshold), threshold_band(threshold)
    metrics = weight_metrics(gap, level, log_weights, raw, applied, band, floor=0.0)
    if isinstance(threshold, tuple):
        metrics["oob_ratio"] = gap.mean(is_outside(raw, *band))
    if batch_normalise:
        applied, metrics["batch_norm_factor"] = batch_normalised(gap, applied, level)
    return applied, metrics


# --- Bypass: two policies. The engine's log-probs are the anchor, and the trainer's before the update are never computed.
#
# The gap from engine to current policy exists only once the current policy's log-probs do, so weights and rejection are
# made inside the loss, of the tokens in the loss and without gradient. The denominators (column `weight`) were fixed before
# that and count rejected tokens, so that the gradient does not depend on how a mini-batch is split.


def bypass_correction(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    surrogate: Tensor | None,
    loss: str = "ppo_clip",
    weights: str | None = None,
    threshold: Bounds = 2.0,
    batch_normalise: bool = False,
    reject: Mapping[str, Bounds] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] the loss of each token, 0 where it is rejected, and marks to log; `anchor` is the engine's log-probs.

    ppo_clip: `surrogate`, the loss of the slots ratio and clip to that anchor, whose ratio is the correction already; its
    weights are only logged. reinforce: -sg(w) A logp, with w = exp(clip(u, -20, 20)) bounded by `threshold`, u = l of the
    token or its sum over the row, l = sg(logp) - anchor; w is 1 without `weights`, and `surrogate` is not read. Mean
    weights (`batch_normalise`) are those of the view, which then holds the whole mini-batch.
    """
    assert view.logp is not None, "a policy's view has log-probs"
    if view.num_tokens == 0:
        return view.logp * 0, {}
    gap = rollout_mismatch(view.logp, anchor, view.offsets)
    level = weights or "token"
    _, raw = raw_weights(gap, level)
    applied = bound_weights(raw, threshold)
    marks = _bypass_token_metrics(gap, level, raw, applied, threshold)
    if loss == "reinforce":
        if batch_normalise and weights is not None:
            applied, _ = batch_normalised(gap, applied, weights)
        factor = gap.spread(applied).to(view.logp.dtype) if weights is not None else 1.0
        per_token = -factor * advantages * view.logp
    else:
        assert surrogate is not None, "ppo_clip is the loss of the slots ratio and clip"
        per_token = surrogate
    if reject:
        keep = accepted_tokens(gap, reject)
        per_token = per_token.masked_fill(~keep, 0.0)
        marks[f"{METRIC_PREFIX}rollout_rs_masked_fraction"] = ~keep
    return per_token, marks


def _bypass_token_metrics(
    gap: RolloutMismatch, level: str, raw: Tensor, applied: Tensor, threshold: Bounds
) -> dict[str, Tensor]:
    """Columns [M] whose means over all tokens of a mini-batch are the metrics of that name.

    What is no mean over tokens (std, extremes, rows) would depend on the split, and is not among them. k3 is clamped here,
    for these columns may be summed in float32.
    """
    low, high = threshold_band(threshold)
    found = {
        "kl": -gap.log_ratio,
        "k3_kl": gap.k3,
        "chi2_token": gap.ratio**2 - 1,
        "rollout_is_mean": gap.spread(applied),
    }
    if level == "token":
        found |= {"rollout_is_ratio_fraction_high": raw > high, "rollout_is_ratio_fraction_low": raw < low}
    return {METRIC_PREFIX + name: column for name, column in found.items()}
