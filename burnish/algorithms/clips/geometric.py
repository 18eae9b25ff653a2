"""GMPO's clip: log-ratios are clipped token by token before they are averaged over the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.clips.ppo import one_sided
from burnish.algorithms.ratios import log_ratio
from burnish.algorithms.view import View


def log_geo(
    view: View, ratio: Tensor, advantages: Tensor, anchor: Tensor, low: float = 0.4, high: float = 0.4
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -a_i exp(mean_t x_it) at each token of sequence i, with a_i = mean_t A_it.

    x = min(l, clip(l, -low, high)) where A > 0, else max of the two: only the side that could run away is cut, and a cut
    token has no gradient. The ratio that is handed in, already averaged, comes too late and is not used.
    GMPO (2507.20673).
    """
    raw = log_ratio(view, anchor)
    x = torch.clamp(raw, *one_sided(advantages, -low, high))
    loss = -view.mean(advantages) * view.mean(x).exp()  # [S]
    cut = x.detach() != raw.detach()
    marks = {"pg_clipfrac": cut & (advantages > 0), "pg_clipfrac_lower": cut & (advantages < 0)}
    return view.spread(loss), marks
