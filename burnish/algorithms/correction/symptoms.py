"""What tells one cause of a gap between engine and trainer from another, beyond how large it is."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.correction.gap import BOUND, LARGEST, Gap, gap_of, written_of
from burnish.algorithms.correction.quantiles import quantiles
from burnish.algorithms.correction.weights import as_floats
from burnish.core.batch import Batch

FAR = 3.0
"""A token whose two probabilities differ by more than e^3 = 20 times is another token, or has another past."""
TYPICAL = 0.95
"""Gaps are cut at this quantile of their size, so that a few absurd tokens do not decide what is said of all."""


def symptoms(batch: Batch, version: int | None = None) -> dict[str, float]:
    """Of l = old_logp - behaviour_logp at `action_mask`, and t = l cut at the 95% quantile of |l|:

    - `gap_median` of |l|; `gap_first`, the median |l| of first tokens of rows, and `gap_rest`, the mean of all others (0 if none);
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
    median, cut = quantiles(size, [0.5, TYPICAL]).clamp(max=BOUND)
    typical = gap.log_ratio.clamp(-cut, cut)
    first = gap.offsets[:-1]
    size_first = size[first]
    away = typical.expm1()
    surprise = old.detach().clamp(-LARGEST, LARGEST).double() - gap.log_ratio / 2  # the mean of the two
    found = {
        "gap_median": median,
        "gap_first": quantiles(size_first, [0.5])[0],
        "gap_rest": (size.sum() - size_first.sum()).clamp(min=0) / max(1, gap.num_tokens - first.shape[0]),
        "far_share": gap.mean(size > FAR),
        "balance": away.sum() / away.abs().sum().clamp(min=1e-300),
        "surprise_corr": _slope(typical, surprise, skip=first)[1],
    }
    if "version" in batch.token:
        found |= _lag(gap, typical.abs(), written.column("version").double(), version)
    return as_floats("mismatch/", found)


def _lag(gap: Gap, size: Tensor, version: Tensor, newest: int | None) -> dict[str, Tensor]:
    lag = (version.max() if newest is None else newest) - version
    slope, correlation = _slope(size, lag)
    return {"lag_mean": gap.mean(lag), "lag_slope": slope, "lag_corr": correlation}


def _slope(y: Tensor, x: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(least-squares slope, correlation) of y on x but for the places `skip`; both 0 where either is constant or empty."""
    x, y = _centred(x, skip), _centred(y, skip)
    xx, yy, xy = x.dot(x), y.dot(y), x.dot(y)
    varies = torch.minimum(xx, yy) > 1e-20 * x.shape[0]  # what is left of a constant is rounding
    none = torch.zeros_like(xy)
    return torch.where(varies, xy / xx, none), torch.where(varies, xy / (xx * yy).sqrt(), none)


def _centred(x: Tensor, skip: Tensor | None) -> Tensor:
    """x less its mean, and 0 at `skip`, which is not in the mean."""
    if skip is None:
        return x - x.mean()
    mean = (x.sum() - x[skip].sum()) / max(1, x.shape[0] - skip.shape[0])
    return (x - mean).index_fill_(0, skip, 0.0)
