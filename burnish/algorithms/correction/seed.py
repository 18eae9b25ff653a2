"""Rollout correction, first form: one weight that is bounded, masked and vetoed, and its report under `mismatch/`."""

from __future__ import annotations

import math

from torch import Tensor

from burnish.algorithms.correction.divergence import divergence_metrics
from burnish.algorithms.correction.gap import Gap, gap_of, written_of
from burnish.algorithms.correction.quantiles import quantiles, row_quantiles
from burnish.algorithms.correction.weights import (
    Corrected,
    as_floats,
    named,
    outside,
    raw_weights,
    weight_dtype,
    weight_metrics,
)
from burnish.core.batch import Batch

SHARES = {"p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95, "p99": 0.99}


def seed_correction(
    batch: Batch,
    apply: bool = True,
    threshold: float = 2.0,
    lower: float | None = None,
    level: str = "token",
    mode: str = "truncate",
    veto: float | None = 1e-4,
    target: str = "weight",
) -> Corrected:
    """W = exp(clip(u, -20, 20)), u = l of the token, its sum or its mean over the row, l = old_logp - behaviour_logp.

    mode truncate: min(W, threshold). mode mask: W where lower <= W <= threshold (lower None: 1/threshold), else rejected.
    A row with any token of exp(l) < veto is rejected, whatever the level. What is rejected has weight 0 and, with target
    `weight`, is still counted in the loss's denominators; with target `mask` it is taken out of `keep` too. Not applied,
    there are only metrics. They are those of W before any bound. Reads `old_logp` and `behaviour_logp` at `action_mask`.
    verl's rollout importance sampling (PR 3694); TIS and MIS: Yao et al. and Liu et al. (2025).
    """
    written = written_of(batch)
    gap = gap_of(written.column("old_logp"), written.column("behaviour_logp"), written.offsets)
    log_weights, raw = raw_weights(gap, level)
    band = (1 / threshold if lower is None else lower, threshold)
    catastrophic = _catastrophic(gap, veto)
    vetoed = gap.rows_with(catastrophic)
    masked = outside(raw, *band) if mode == "mask" else None
    metrics = {
        "rollout_is_veto_fraction": vetoed.double().mean(),
        "rollout_is_catastrophic_token_fraction": gap.mean(catastrophic),
        **named("rollout_is_", weight_metrics(gap, level, log_weights, raw, raw, band, floor=band[0])),
        **named("rollout_is_", _percentiles(gap, raw)),
        **named("mismatch_", divergence_metrics(gap)),
    }
    if masked is not None:
        metrics["rollout_is_masked_fraction"] = gap.mean(masked)
        metrics["rollout_is_seq_masked_fraction"] = gap.rows_with(masked).double().mean()
    numbers = as_floats("mismatch/", metrics)
    if not apply:
        return Corrected(None, batch.action_mask, numbers)
    rejected = _rejected(gap, masked, vetoed)
    weights = gap.spread(raw.clamp(max=threshold)).masked_fill(rejected, 0.0)
    keep = written.back(~rejected) if target == "mask" else batch.action_mask
    return Corrected(written.back(weights.to(weight_dtype(batch))), keep, numbers)


def measured(batch: Batch) -> Corrected:
    """Nothing is corrected: the report alone, with a bound of 2 where a metric needs one."""
    return seed_correction(batch, apply=False)


def _catastrophic(gap: Gap, veto: float | None) -> Tensor:
    """[M] bool: tokens the trainer finds all but impossible."""
    return gap.log_ratio < (math.log(veto) if veto is not None else -math.inf)


def _rejected(gap: Gap, masked: Tensor | None, vetoed: Tensor) -> Tensor:
    """[M] bool."""
    if masked is None:
        return gap.spread(vetoed)
    if masked.shape == vetoed.shape:
        return gap.spread(masked | vetoed)
    return masked | gap.spread(vetoed)


def _percentiles(gap: Gap, raw: Tensor) -> dict[str, Tensor]:
    shares = list(SHARES.values())
    if raw.shape[0] == gap.num_tokens:
        found = quantiles(raw, shares)
    else:
        found = row_quantiles(raw, gap.lengths, shares)
    return dict(zip(SHARES, found, strict=True))
