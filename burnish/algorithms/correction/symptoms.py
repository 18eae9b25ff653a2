"""What tells one cause of a gap between engine and trainer from another, beyond how large it is."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.correction.gap import Gap, gap_of, written_of
from burnish.algorithms.correction.quantiles import quantiles
from burnish.algorithms.correction.weights import as_floats
from burnish.core.batch import Batch

FAR = 3.0
"""A token whose two probabilities differ by more than e^3 = 20 times is another token, or has another past."""
TYPICAL = 0.95
"""Gaps are cut at this quantile of their size, so that a few absurd tokens do not decide what is said of all."""


def symptoms(batch: Batch, version: int | None = None) -> dict[str, float]:
    """Of l = old_logp - behaviour_logp at `action_mask`, and t = l cut at the 95% quantile of |l|:

    - `gap_median` of |l|; `gap_first` and `gap_rest`, the mean |l| of each row's first token and of the others (0 if none);
    - `far_share`, the share of |l| > 3;
    - `balance` = sum(e^t - 1) / sum|e^t - 1|. Tokens sampled from mu have E[pi/mu] = 1 wherever mu covers pi, so this is near
      0 for noise, staleness and temperature alike, and -1 where mu leaves out a part of pi, as top-p and top-k do;
    - `surprise_corr`, the correlation of t with (old + behaviour) / 2 but for first tokens: 0 for noise. A temperature
      has mu = pi^b / Z and l = (1 - b) log pi + log Z: above 0 for a hotter engine, below for a colder one;
    - where there is a column `version`: `lag_mean` of the updates since a token's weights, to `version` (None: the newest of
      the batch); `lag_slope` of |t| on that lag, and their correlation `lag_corr`.

    A correlation with something constant is 0.
    """
    written = written_of(batch)
    old, behaviour = written.column("old_logp"), written.column("behaviour_logp")
    gap = gap_of(old, behaviour, written.offsets)
    size = gap.log_ratio.abs()
    median, cut = quantiles(size, [0.5, TYPICAL])
    typical = torch.minimum(size, cut) * gap.log_ratio.sign()
    is_first = torch.zeros_like(size, dtype=torch.bool).index_fill_(0, gap.offsets[:-1], True)
    away = typical.clamp(max=20).expm1()
    surprise = (old.detach().double() + behaviour.detach().double()).clamp(-600, 600) / 2
    found = {
        "gap_median": median,
        "gap_first": size[is_first].mean(),
        "gap_rest": size[~is_first].sum() / (~is_first).sum().clamp(min=1),
        "far_share": gap.mean(size > FAR),
        "balance": away.sum() / away.abs().sum().clamp(min=1e-300),
        "surprise_corr": _slope(typical[~is_first], surprise[~is_first])[1],
    }
    if "version" in batch.token:
        found |= _lag(gap, typical.abs(), written.column("version").double(), version)
    return as_floats("mismatch/", found)


def _lag(gap: Gap, size: Tensor, version: Tensor, newest: int | None) -> dict[str, Tensor]:
    lag = (version.max() if newest is None else newest) - version
    slope, correlation = _slope(size, lag)
    return {"lag_mean": gap.mean(lag), "lag_slope": slope, "lag_corr": correlation}


def _slope(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(least-squares slope, correlation) of y on x, both 0 where either is constant or empty."""
    if x.shape[0] == 0:
        return x.new_zeros(()), x.new_zeros(())
    x, y = x - x.mean(), y - y.mean()
    xx, yy, xy = x.dot(x), y.dot(y), x.dot(y)
    none = torch.zeros_like(xy)
    return torch.where(xx > 0, xy / xx, none), torch.where((xx > 0) & (yy > 0), xy / (xx * yy).sqrt(), none)
