"""Rejection: tokens and rows in which engine and trainer are too far apart leave the loss (a hard trust region).

An option is a statistic and a divergence. With l clamped to +-20: k1 = -l, k2 = l^2/2, k3 = exp(l) - 1 - l (Schulman,
2020); the statistic is each token's (`token`), or a row's sum, mean or largest (`seq_sum`, `seq_mean`, `seq_max`).

Bounds of k2 and k3 are one number: kept where the statistic is at most that. Bounds of k1 are two, and bound the ratio
r = exp(-statistic) of trainer to engine: kept where low <= r <= high. verl compares k1 itself with (log low, log high),
which keeps r in [1/high, 1/low]: the same set for bounds that are each other's inverse, as one number u = [1/u, u] is,
and the mirrored set for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from burnish.algorithms.correction.gap import Gap
from burnish.algorithms.correction.weights import named, row_metrics
from burnish.core.segments import contiguous_sum

Bounds = float | tuple[float, float]


def statistic(gap: Gap, option: str) -> Tensor:
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


def interval(option: str, bounds: Bounds) -> tuple[float, float]:
    """The statistic's own bounds: [-log high, -log low] for k1, up to the bound for the others."""
    if not option.endswith("k1"):
        assert not isinstance(bounds, tuple), f"{option} has one bound"
        return -math.inf, bounds
    low, high = bounds if isinstance(bounds, tuple) else (1 / bounds, bounds)
    return -math.log(high), -math.log(low)


def kept(gap: Gap, reject: Mapping[str, Bounds]) -> Tensor:
    """[M] bool: tokens that every option keeps, each within the bounds it is given."""
    return _all_of(gap, [_inside(statistic(gap, name), *interval(name, bounds)) for name, bounds in reject.items()])


def rejection(gap: Gap, reject: Mapping[str, Bounds]) -> tuple[Tensor, dict[str, Tensor]]:
    """`kept`, with what is said of each option under `rollout_rs_{option}_` and of all together under `rollout_rs_`."""
    verdicts: list[Tensor] = []
    metrics: dict[str, Tensor] = {}
    for option, bounds in reject.items():
        values, ends = statistic(gap, option), interval(option, bounds)
        verdicts.append(_inside(values, *ends))
        found = {**_option_metrics(gap, values, ends), **_masked(gap, ~verdicts[-1])}
        metrics |= named(f"rollout_rs_{option}_", found)
    keep = _all_of(gap, verdicts)
    return keep, metrics | named("rollout_rs_", _masked(gap, ~keep))


def _all_of(gap: Gap, verdicts: Sequence[Tensor]) -> Tensor:
    """[M] bool: what all verdicts on tokens [M] and rows [R] keep; rows are spread over their tokens once."""
    on_rows = [v for v in verdicts if v.shape == gap.lengths.shape]
    on_tokens = [v for v in verdicts if v.shape != gap.lengths.shape]
    keep = gap.spread(reduce(torch.logical_and, on_rows, torch.ones_like(gap.lengths, dtype=torch.bool)))
    return reduce(torch.logical_and, on_tokens, keep)


def _inside(statistic: Tensor, low: float, high: float) -> Tensor:
    """bool; a bound of -inf is no bound."""
    inside = statistic <= high
    return inside if low == -math.inf else inside.logical_and_(statistic >= low)


def _masked(gap: Gap, rejected: Tensor) -> dict[str, Tensor]:
    """The share of tokens rejected, and of rows with any rejected token."""
    return {
        "masked_fraction": gap.mean(rejected),
        "seq_masked_fraction": gap.rows_with(rejected).double().mean(),
    }


def _option_metrics(gap: Gap, values: Tensor, ends: tuple[float, float]) -> dict[str, Tensor]:
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
