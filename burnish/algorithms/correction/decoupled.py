"""Rollout correction, second form: weights and rejection apart, each with its own bounds; the report is `rollout_corr/`.

Decoupled: three policies, with the trainer's before the first update as the anchor of the clip. The gap from engine to
anchor is corrected here, the drift from anchor to the current policy by the clip. Decoupled PPO (2110.00641).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from burnish.algorithms.correction.divergence import chi_square_metrics, divergence_metrics
from burnish.algorithms.correction.gap import Gap, gap_of, written_of
from burnish.algorithms.correction.rejection import Bounds, rejection
from burnish.algorithms.correction.weights import (
    Corrected,
    as_floats,
    bounded,
    edges,
    named,
    normalised,
    outside,
    raw_weights,
    weight_dtype,
    weight_metrics,
)
from burnish.core.batch import Batch

PREFIX = "rollout_corr/"


def decoupled_correction(
    batch: Batch,
    weights: str | None = None,
    threshold: Bounds = 2.0,
    batch_normalise: bool = False,
    reject: Mapping[str, Bounds] | None = None,
) -> Corrected:
    """Weights of each token or sequence (or none), and the tokens that every option of `reject` keeps.

    W = exp(clip(u, -20, 20)), u = l of the token or its sum over the row, l = old_logp - behaviour_logp. One threshold C:
    min(W, C). Two: W inside [low, high], else 0, the token still counted. `batch_normalise` divides what is applied by its
    mean over tokens (weights token) or rows (sequence), last. Metrics and the mean are taken over everything the model
    wrote, rejected or not. Reads `old_logp` and `behaviour_logp` at `action_mask`. TIS: Yao et al. (2025); MIS: Liu et al.
    (2025); IcePop (2510.18855).
    """
    written = written_of(batch)
    gap = gap_of(written.column("old_logp"), written.column("behaviour_logp"), written.offsets)
    metrics = {**divergence_metrics(gap), **chi_square_metrics(gap)}
    applied = None
    if weights is not None:
        found, said = _importance(gap, weights, threshold, batch_normalise)
        applied = written.back(gap.spread(found).to(weight_dtype(batch)))
        metrics |= named("rollout_is_", said)
    keep = batch.action_mask
    if reject:
        inside, said = rejection(gap, reject)
        keep = written.back(inside)
        metrics |= said
    return Corrected(applied, keep, as_floats(PREFIX, metrics))


def _importance(gap: Gap, level: str, threshold: Bounds, batch_normalise: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights that are applied, and what is said of them before they are normalised."""
    log_weights, raw = raw_weights(gap, level)
    applied, band = bounded(raw, threshold), edges(threshold)
    metrics = weight_metrics(gap, level, log_weights, raw, applied, band, floor=0.0)
    if isinstance(threshold, tuple):
        metrics["oob_ratio"] = gap.mean(outside(raw, *band))
    if batch_normalise:
        applied, metrics["batch_norm_factor"] = normalised(gap, applied, level)
    return applied, metrics
