"""Importance weights from the engine's policy to the trainer's: raw, bounded, and what is said of them.

A weight is exp(l) of a token, of a whole row (the sum of its l) or of a row's geometric mean (the mean of its l). Raw
weights keep the gradient unbiased and may have any variance; truncating them (TIS, Yao et al. 2025) or dropping those
out of a band (MIS; IcePop, 2510.18855) buys variance with bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.algorithms.correction.gap import BOUND, Gap
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum


@dataclass(frozen=True)
class Corrected:
    """What a correction does to a batch."""

    weights: Tensor | None
    """[N] what each token's policy loss is multiplied with, 0 where the model did not write; None leaves the loss as it is."""
    keep: Tensor
    """[N] bool, within the tokens the model wrote: those that stay in the loss, to be ANDed with `loss_mask`."""
    metrics: dict[str, float]


def weight_dtype(batch: Batch) -> torch.dtype:
    """Weights come in the type of the log-probs they multiply, float32 at least."""
    return torch.promote_types(batch.token["old_logp"].dtype, torch.float32)


def raw_weights(gap: Gap, level: str) -> tuple[Tensor, Tensor]:
    """(u, W): the log-weight as it is, and W = exp(clip(u, -20, 20)); [M] at level token, [R] at sequence and geometric."""
    if level == "token":
        return gap.log_ratio, gap.ratio
    if level not in ("sequence", "geometric"):
        raise ValueError(f"unknown level {level!r}: token, sequence or geometric")
    u = gap.log_ratio_sum if level == "sequence" else gap.log_ratio_sum / gap.lengths
    return u, u.clamp(-BOUND, BOUND).exp()


def outside(weights: Tensor, low: float, high: float) -> Tensor:
    """bool: not in [low, high]."""
    return (weights < low) | (weights > high)


def bounded(weights: Tensor, threshold: float | tuple[float, float]) -> Tensor:
    """min(W, C) for one number (TIS); W inside [low, high], else 0, for two (IcePop)."""
    if not isinstance(threshold, tuple):
        return weights.clamp(max=threshold)
    return weights.masked_fill(outside(weights, *threshold), 0.0)


def edges(threshold: float | tuple[float, float]) -> tuple[float, float]:
    """The band a threshold stands for in metrics: one number C is [1/C, C]."""
    return threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)


def normalised(gap: Gap, weights: Tensor, level: str) -> tuple[Tensor, Tensor]:
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
    gap: Gap, level: str, log_weights: Tensor, raw: Tensor, used: Tensor, band: tuple[float, float], floor: float
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
        smallest, largest = log_weights.min().exp(), log_weights.max().clamp(max=BOUND).exp()
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


def as_floats(prefix: str, metrics: dict[str, Tensor]) -> dict[str, float]:
    """The metrics as numbers, fetched from the device at once."""
    values = torch.stack([m.double() for m in metrics.values()]).tolist()
    return {prefix + name: value for name, value in zip(metrics, values, strict=True)}


def named(stem: str, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The metrics under longer names."""
    return {stem + name: value for name, value in metrics.items()}
