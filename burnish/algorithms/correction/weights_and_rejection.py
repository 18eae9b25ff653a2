"""Importance weights from the engine's policy to the trainer's, and rejection of tokens and rows.

A weight is exp(l) of a token, exp(sum_t l) of a row, or exp(mean_t l), the row's geometric mean. Raw weights keep the
gradient unbiased but may have any variance. Truncating them (TIS, Yao et al. 2025) or dropping those outside a band (MIS;
IcePop, 2510.18855) trades variance for bias. Rejection is a hard trust region: tokens and rows in which engine and
trainer are too far apart leave the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from burnish.algorithms.correction.rollout_mismatch import LOG_RATIO_BOUND, RolloutMismatch
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum


@dataclass(frozen=True)
class CorrectionResult:
    """What a correction does to a batch."""

    weights: Tensor | None
    """[N] factor of each token's policy loss, 0 outside `action_mask`; None leaves the loss as it is."""
    keep: Tensor
    """[N] bool: the action tokens that stay in the loss, to be ANDed with `loss_mask`."""
    metrics: dict[str, float]


def weight_dtype(batch: Batch) -> torch.dtype:
    """Weights have the dtype of the log-probs they multiply, float32 at least."""
    return torch.promote_types(batch.token["old_logp"].dtype, torch.float32)


def raw_weights(mismatch: RolloutMismatch, level: str) -> tuple[Tensor, Tensor]:
    """The log-weight u and W = exp(clip(u, -20, 20)): [M] at level token, [R] at levels sequence and geometric."""
    if level == "token":
        return mismatch.log_ratio, mismatch.ratio
    if level not in ("sequence", "geometric"):
        raise ValueError(f"unknown level {level!r}: token, sequence or geometric")
    u = mismatch.log_ratio_sum if level == "sequence" else mismatch.log_ratio_sum / mismatch.lengths
    return u, u.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def is_outside(weights: Tensor, low: float, high: float) -> Tensor:
    """bool: not in [low, high]."""
    return (weights < low) | (weights > high)


def bound_weights(weights: Tensor, threshold: float | tuple[float, float]) -> Tensor:
    """min(W, C) for one threshold C (TIS); for two, W inside [low, high], else 0 (IcePop)."""
    if not isinstance(threshold, tuple):
        return weights.clamp(max=threshold)
    return weights.masked_fill(is_outside(weights, *threshold), 0.0)


def threshold_band(threshold: float | tuple[float, float]) -> tuple[float, float]:
    """The band that metrics use for a threshold: one number C is [1/C, C]."""
    return threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)


def batch_normalised(mismatch: RolloutMismatch, weights: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """The weights divided by their mean, and that mean: over tokens at level token, over rows at level sequence.

    A mean of about 0 is taken as 1.
    """
    mean = mismatch.mean(weights) if level == "token" else weights.mean()
    factor = torch.where(mean > 1e-8, mean, torch.ones_like(mean))
    return weights / factor, factor


def sequence_weights(weights: Tensor, offsets: Tensor) -> Tensor:
    """[S] exp(mean_t log(W_t + 1e-10)) of token weights [M]: the weight of a loss that is one number per sequence (GMPO).

    A sequence without tokens has weight 1.
    """
    return (contiguous_sum((weights + 1e-10).log(), offsets) / offsets.diff().clamp(min=1)).exp()


# --- Metrics of weights


def weight_metrics(
    mismatch: RolloutMismatch,
    level: str,
    log_weights: Tensor,
    raw: Tensor,
    used: Tensor,
    band: tuple[float, float],
    floor: float,
) -> dict[str, Tensor]:
    """Metrics of weights, with u = `log_weights`, W = `raw`, V = `used` and c = clip(V, floor, high).

    - mean of V; std and effective sample size of c. The effective sample size mean(c)^2 / mean(c^2) is 1 for equal weights.
    - max and min of V at level token. At row levels they are of exp(u), which is not clamped (the largest is at most e^20).
    - shares of W above and below the band (of rows at level sequence).
    - of each row's mean of V: mean, std (n-1), max, min and largest distance from 1; of its mean of W, the shares outside.
    """
    low, high = band
    c = used.clamp(floor, high)
    mean, square = mismatch.mean(c), mismatch.mean_square(c)
    if level == "token":
        smallest, largest, below, above = used.min(), used.max(), mismatch.mean(raw < low), mismatch.mean(raw > high)
    else:
        smallest, largest = log_weights.min().exp(), log_weights.max().clamp(max=LOG_RATIO_BOUND).exp()
        flags = log_weights < math.log(low), log_weights > math.log(high)
        below, above = (f.double().mean() if level == "sequence" else mismatch.mean(f) for f in flags)
    per_row = mismatch.row_means(used)
    raw_per_row = per_row if raw is used else mismatch.row_means(raw)
    return {
        "mean": mismatch.mean(used),
        "max": largest,
        "min": smallest,
        "std": mismatch.std(c),
        "eff_sample_size": torch.where(square > 0, mean**2 / square, torch.zeros_like(square)).clamp(max=1),
        "ratio_fraction_high": above,
        "ratio_fraction_low": below,
        **row_metrics(per_row, centre=1.0),
        "seq_fraction_high": (raw_per_row > high).double().mean(),
        "seq_fraction_low": (raw_per_row < low).double().mean(),
    }


def row_metrics(values: Tensor, centre: float) -> dict[str, Tensor]:
    """Mean, std (n-1, 0 for one row), max, min and largest distance from `centre` of one value per row."""
    return {
        "seq_mean": values.mean(),
        "seq_std": values.std() if values.shape[0] > 1 else values.new_zeros(()),
        "seq_max": values.max(),
        "seq_min": values.min(),
        "seq_max_deviation": (values - centre).abs().max(),
    }


def metrics_to_floats(prefix: str, metrics: dict[str, Tensor]) -> dict[str, float]:
    """The metrics as floats, fetched from the device in one transfer."""
    values = torch.stack([m.double() for m in metrics.values()]).tolist()
    return {prefix + name: value for name, value in zip(metrics, values, strict=True)}


def with_prefix(stem: str, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The metrics with a prefix before each name."""
    return {stem + name: value for name, value in metrics.items()}


# --- Rejection
#
# An option is `<statistic>_<divergence>`. With l clamped to +-20 the divergences are k1 = -l, k2 = l^2/2 and
# k3 = exp(l) - 1 - l (Schulman, 2020). The statistic is each token's value (`token`), or a row's sum, mean or maximum
# (`seq_sum`, `seq_mean`, `seq_max`).
#
# k2 and k3 have one bound: values up to it are accepted. k1 has two, which bound the ratio r = exp(-statistic) of trainer
# to engine: low <= r <= high is accepted. verl compares k1 itself with (log low, log high), which accepts r in
# [1/high, 1/low]. The two are the same for bounds that are each other's inverse (one number u means [1/u, u]) and
# mirrored otherwise.

Bounds = float | tuple[float, float]


def rejection_statistic(mismatch: RolloutMismatch, option: str) -> Tensor:
    """The statistic of a rejection option: [M] for token options, [R] for the others."""
    over, kind = option.rsplit("_", 1)
    if over not in ("token", "seq_sum", "seq_mean", "seq_max"):
        raise ValueError(f"unknown rejection {option!r}")
    values: Tensor = getattr(mismatch, kind)
    if over == "token":
        return values
    if over == "seq_max":
        return torch.segment_reduce(values, "max", offsets=mismatch.offsets, unsafe=True)
    sums = contiguous_sum(values, mismatch.offsets)
    return sums if over == "seq_sum" else sums / mismatch.lengths


def statistic_bounds(option: str, bounds: Bounds) -> tuple[float, float]:
    """The bounds of the statistic itself: [-log high, -log low] for k1, [-inf, bound] for k2 and k3."""
    if not option.endswith("k1"):
        assert not isinstance(bounds, tuple), f"{option} has one bound"
        return -math.inf, bounds
    low, high = bounds if isinstance(bounds, tuple) else (1 / bounds, bounds)
    return -math.log(high), -math.log(low)


def accepted_tokens(mismatch: RolloutMismatch, reject: Mapping[str, Bounds]) -> Tensor:
    """[M] bool: tokens that are within the bounds of every option."""
    return _accepted_by_all(
        mismatch,
        [
            _is_inside(rejection_statistic(mismatch, name), *statistic_bounds(name, bounds))
            for name, bounds in reject.items()
        ],
    )


def accepted_tokens_with_metrics(
    mismatch: RolloutMismatch, reject: Mapping[str, Bounds]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`accepted_tokens`, and metrics of each option (`rollout_rs_{option}_*`) and of all together (`rollout_rs_*`)."""
    verdicts: list[Tensor] = []
    metrics: dict[str, Tensor] = {}
    for option, bounds in reject.items():
        values, ends = rejection_statistic(mismatch, option), statistic_bounds(option, bounds)
        verdicts.append(_is_inside(values, *ends))
        found = {**_statistic_metrics(mismatch, values, ends), **_rejected_fractions(mismatch, ~verdicts[-1])}
        metrics |= with_prefix(f"rollout_rs_{option}_", found)
    keep = _accepted_by_all(mismatch, verdicts)
    return keep, metrics | with_prefix("rollout_rs_", _rejected_fractions(mismatch, ~keep))


def _accepted_by_all(mismatch: RolloutMismatch, verdicts: Sequence[Tensor]) -> Tensor:
    """[M] bool: tokens accepted by all verdicts on tokens [M] and on rows [R]."""
    on_rows = [v for v in verdicts if v.shape == mismatch.lengths.shape]
    on_tokens = [v for v in verdicts if v.shape != mismatch.lengths.shape]
    keep = mismatch.spread(reduce(torch.logical_and, on_rows, torch.ones_like(mismatch.lengths, dtype=torch.bool)))
    return reduce(torch.logical_and, on_tokens, keep)


def _is_inside(statistic: Tensor, low: float, high: float) -> Tensor:
    """bool: low <= statistic <= high; a `low` of -inf is not compared."""
    inside = statistic <= high
    return inside if low == -math.inf else inside.logical_and_(statistic >= low)


def _rejected_fractions(mismatch: RolloutMismatch, rejected: Tensor) -> dict[str, Tensor]:
    """The share of rejected tokens, and of rows with any rejected token."""
    return {
        "masked_fraction": mismatch.mean(rejected),
        "seq_masked_fraction": mismatch.any_in_row(rejected).double().mean(),
    }


def _statistic_metrics(mismatch: RolloutMismatch, values: Tensor, ends: tuple[float, float]) -> dict[str, Tensor]:
    """Metrics of a statistic with the bounds `ends`.

    Over tokens: mean, and std of the statistic clamped to its bounds. Over its own tokens or rows: max, min and the shares
    out of bounds. Over rows: the same of each row's mean, with distances from 0. For k1, high and low refer to the ratio:
    high is above the ratio's upper bound, where k1 is smallest.
    """
    low, high = ends
    per_row = mismatch.row_means(values)

    def shares(x: Tensor) -> tuple[Tensor, Tensor]:
        above = (x > high).count_nonzero().double() / x.shape[0]
        if low == -math.inf:
            return above, torch.zeros_like(above)
        return (x < low).count_nonzero().double() / x.shape[0], above

    fraction_high, fraction_low = shares(values)
    seq_high, seq_low = shares(per_row)
    c = values.clamp(0.0 if low == -math.inf else low, high)
    return {
        "mean": mismatch.mean(values),
        "max": values.max(),
        "min": values.min(),
        "std": mismatch.std(c),
        "fraction_high": fraction_high,
        "fraction_low": fraction_low,
        **row_metrics(per_row, centre=0.0),
        "seq_fraction_high": seq_high,
        "seq_fraction_low": seq_low,
    }
