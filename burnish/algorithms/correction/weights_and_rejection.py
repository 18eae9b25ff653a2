"""Importance weights from the engine's policy to the trainer's: raw, bounded, and what is said of them.

A weight is exp(l) of a token, of a whole row (the sum of its l) or of a row's geometric mean (the mean of its l). Raw
weights keep the gradient unbiased and may have any variance; truncating them (TIS, Yao et al. 2025) or dropping those
out of a band (MIS; IcePop, 2510.18855) buys variance with bias.
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
    """[N] what each token's policy loss is multiplied with, 0 where the model did not write; None leaves the loss as it is."""
    keep: Tensor
    """[N] bool, within the tokens the model wrote: those that stay in the loss, to be ANDed with `loss_mask`."""
    metrics: dict[str, float]


def weight_dtype(batch: Batch) -> torch.dtype:
    """Weights come in the type of the log-probs they multiply, float32 at least."""
    return torch.promote_types(batch.token["old_logp"].dtype, torch.float32)


def raw_weights(gap: RolloutMismatch, level: str) -> tuple[Tensor, Tensor]:
    """(u, W): the log-weight as it is, and W = exp(clip(u, -20, 20)); [M] at level token, [R] at sequence and geometric."""
    if level == "token":
        return gap.log_ratio, gap.ratio
    if level not in ("sequence", "geometric"):
        raise ValueError(f"unknown level {level!r}: token, sequence or geometric")
    u = gap.log_ratio_sum if level == "sequence" else gap.log_ratio_sum / gap.lengths
    return u, u.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def is_outside(weights: Tensor, low: float, high: float) -> Tensor:
    """bool: not in [low, high]."""
    return (weights < low) | (weights > high)


def bound_weights(weights: Tensor, threshold: float | tuple[float, float]) -> Tensor:
    """min(W, C) for one number (TIS); W inside [low, high], else 0, for two (IcePop)."""
    if not isinstance(threshold, tuple):
        return weights.clamp(max=threshold)
    return weights.masked_fill(is_outside(weights, *threshold), 0.0)


def threshold_band(threshold: float | tuple[float, float]) -> tuple[float, float]:
    """The band a threshold stands for in metrics: one number C is [1/C, C]."""
    return threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)


def batch_normalised(gap: RolloutMismatch, weights: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """(weights over their mean, that mean): over tokens at level token, over rows at sequence; 1 if the mean is about 0."""
    mean = gap.mean(weights) if level == "token" else weights.mean()
    factor = torch.where(mean > 1e-8, mean, torch.ones_like(mean))
    return weights / factor, factor


def sequence_weights(weights: Tensor, offsets: Tensor) -> Tensor:
    """[S] exp(mean_t log(W_t + 1e-10)): the weight of a loss that is one number a sequence (GMPO), from those [M] of its
    tokens. A sequence without tokens has 1, and no loss to multiply.
    """
    return (contiguous_sum((weights + 1e-10).log(), offsets) / offsets.diff().clamp(min=1)).exp()


# --- metrics -----------------------------------------------------------------------------------------------------------


def weight_metrics(
    gap: RolloutMismatch,
    level: str,
    log_weights: Tensor,
    raw: Tensor,
    used: Tensor,
    band: tuple[float, float],
    floor: float,
) -> dict[str, Tensor]:
    """What is said of weights, with u = `log_weights`, W = `raw`, V = `used` and c = clip(V, floor, high).

    mean V; std and effective sample size of c; max and min of V, or at row levels of exp(u), which no clamp has touched
    (but the largest is at most e^20); the share of W (of rows at level sequence) above and below the band; and of each
    row's mean of V its mean, std (n-1), max, min and largest distance from 1, of its mean of W the shares outside.
    The effective sample size mean(c)^2 / mean(c^2) is a fraction: 1 where all weights are equal.
    """
    low, high = band
    c = used.clamp(floor, high)
    mean, square = gap.mean(c), gap.mean_square(c)
    if level == "token":
        smallest, largest, below, above = used.min(), used.max(), gap.mean(raw < low), gap.mean(raw > high)
    else:
        smallest, largest = log_weights.min().exp(), log_weights.max().clamp(max=LOG_RATIO_BOUND).exp()
        flags = log_weights < math.log(low), log_weights > math.log(high)
        below, above = (f.double().mean() if level == "sequence" else gap.mean(f) for f in flags)
    per_row = gap.rows(used)
    raw_per_row = per_row if raw is used else gap.rows(raw)
    return {
        "mean": gap.mean(used),
        "max": largest,
        "min": smallest,
        "std": gap.std(c),
        "eff_sample_size": torch.where(square > 0, mean**2 / square, torch.zeros_like(square)).clamp(max=1),
        "ratio_fraction_high": above,
        "ratio_fraction_low": below,
        **row_metrics(per_row, centre=1.0),
        "seq_fraction_high": (raw_per_row > high).double().mean(),
        "seq_fraction_low": (raw_per_row < low).double().mean(),
    }


def row_metrics(values: Tensor, centre: float) -> dict[str, Tensor]:
    """Mean, std (n-1, 0 for one row), max, min and largest distance from `centre` of one value a row."""
    return {
        "seq_mean": values.mean(),
        "seq_std": values.std() if values.shape[0] > 1 else values.new_zeros(()),
        "seq_max": values.max(),
        "seq_min": values.min(),
        "seq_max_deviation": (values - centre).abs().max(),
    }


def metrics_to_floats(prefix: str, metrics: dict[str, Tensor]) -> dict[str, float]:
    """The metrics as numbers, fetched from the device at once."""
    values = torch.stack([m.double() for m in metrics.values()]).tolist()
    return {prefix + name: value for name, value in zip(metrics, values, strict=True)}


def with_prefix(stem: str, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The metrics under longer names."""
    return {stem + name: value for name, value in metrics.items()}


# --- Rejection: tokens and rows in which engine and trainer are too far apart leave the loss (a hard trust region).
#
# An option is a statistic and a divergence. With l clamped to +-20: k1 = -l, k2 = l^2/2, k3 = exp(l) - 1 - l (Schulman,
# 2020); the statistic is each token's (`token`), or a row's sum, mean or largest (`seq_sum`, `seq_mean`, `seq_max`).
#
# Bounds of k2 and k3 are one number: kept where the statistic is at most that. Bounds of k1 are two, and bound the ratio
# r = exp(-statistic) of trainer to engine: kept where low <= r <= high. verl compares k1 itself with (log low, log high),
# which keeps r in [1/high, 1/low]: the same set for bounds that are each other's inverse, as one number u = [1/u, u] is,
# and the mirrored set for others.

Bounds = float | tuple[float, float]


def rejection_statistic(gap: RolloutMismatch, option: str) -> Tensor:
    """[M] for token options, [R] for the others."""
    over, kind = option.rsplit("_", 1)
    if over not in ("token", "seq_sum", "seq_mean", "seq_max"):
        raise ValueError(f"unknown rejection {option!r}")
    values: Tensor = getattr(gap, kind)
    if over == "token":
        return values
    if over == "seq_max":
        return torch.segment_reduce(values, "max", offsets=gap.offsets, unsafe=True)
    sums = contiguous_sum(values, gap.offsets)
    return sums if over == "seq_sum" else sums / gap.lengths


def statistic_bounds(option: str, bounds: Bounds) -> tuple[float, float]:
    """The statistic's own bounds: [-log high, -log low] for k1, up to the bound for the others."""
    if not option.endswith("k1"):
        assert not isinstance(bounds, tuple), f"{option} has one bound"
        return -math.inf, bounds
    low, high = bounds if isinstance(bounds, tuple) else (1 / bounds, bounds)
    return -math.log(high), -math.log(low)


def accepted_tokens(gap: RolloutMismatch, reject: Mapping[str, Bounds]) -> Tensor:
    """[M] bool: tokens that every option keeps, each within the bounds it is given."""
    return _accepted_by_all(
        gap,
        [
            _is_inside(rejection_statistic(gap, name), *statistic_bounds(name, bounds))
            for name, bounds in reject.items()
        ],
    )


def accepted_tokens_with_metrics(
    gap: RolloutMismatch, reject: Mapping[str, Bounds]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`kept`, with what is said of each option under `rollout_rs_{option}_` and of all together under `rollout_rs_`."""
    verdicts: list[Tensor] = []
    metrics: dict[str, Tensor] = {}
    for option, bounds in reject.items():
        values, ends = rejection_statistic(gap, option), statistic_bounds(option, bounds)
        verdicts.append(_is_inside(values, *ends))
        found = {**_statistic_metrics(gap, values, ends), **_rejected_fractions(gap, ~verdicts[-1])}
        metrics |= with_prefix(f"rollout_rs_{option}_", found)
    keep = _accepted_by_all(gap, verdicts)
    return keep, metrics | with_prefix("rollout_rs_", _rejected_fractions(gap, ~keep))


def _accepted_by_all(gap: RolloutMismatch, verdicts: Sequence[Tensor]) -> Tensor:
    """[M] bool: what all verdicts on tokens [M] and rows [R] keep; rows are spread over their tokens once."""
    on_rows = [v for v in verdicts if v.shape == gap.lengths.shape]
    on_tokens = [v for v in verdicts if v.shape != gap.lengths.shape]
    keep = gap.spread(reduce(torch.logical_and, on_rows, torch.ones_like(gap.lengths, dtype=torch.bool)))
    return reduce(torch.logical_and, on_tokens, keep)


def _is_inside(statistic: Tensor, low: float, high: float) -> Tensor:
    """bool; a bound of -inf is no bound."""
    inside = statistic <= high
    return inside if low == -math.inf else inside.logical_and_(statistic >= low)


def _rejected_fractions(gap: RolloutMismatch, rejected: Tensor) -> dict[str, Tensor]:
    """The share of tokens rejected, and of rows with any rejected token."""
    return {
        "masked_fraction": gap.mean(rejected),
        "seq_masked_fraction": gap.rows_with(rejected).double().mean(),
    }


def _statistic_metrics(gap: RolloutMismatch, values: Tensor, ends: tuple[float, float]) -> dict[str, Tensor]:
    """Of the statistic: its mean over tokens, the std over tokens of it clamped to its bounds, and over its own tokens or
    rows max, min and the shares out of bounds; then the same over rows of each row's mean, with distances from 0.
    High and low speak of the ratio for k1 (high: above its upper bound, where k1 is smallest), of the statistic for others.
    """
    low, high = ends
    per_row = gap.rows(values)

    def shares(x: Tensor) -> tuple[Tensor, Tensor]:
        above = (x > high).count_nonzero().double() / x.shape[0]
        if low == -math.inf:
            return above, torch.zeros_like(above)
        return (x < low).count_nonzero().double() / x.shape[0], above

    fraction_high, fraction_low = shares(values)
    seq_high, seq_low = shares(per_row)
    c = values.clamp(0.0 if low == -math.inf else low, high)
    return {
        "mean": gap.mean(values),
        "max": values.max(),
        "min": values.min(),
        "std": gap.std(c),
        "fraction_high": fraction_high,
        "fraction_low": fraction_low,
        **row_metrics(per_row, centre=0.0),
        "seq_fraction_high": seq_high,
        "seq_fraction_low": seq_low,
    }
