"""PPO's pessimistic clip with its variations, and no clip at all."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.ratios import log_ratio
from burnish.algorithms.view import View


def no_clip(view: View, ratio: Tensor, advantages: Tensor, anchor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A r."""
    return -advantages * ratio, {}


def ppo(
    view: View,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    drift: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] max(-A r, -A clip(r, 1-low, 1+high)), for A < 0 at most -A*dual; 0 where the sequence has drifted.

    A token of negative advantage whose sequence has mean_t(anchor - logp) > drift leaves the loss but not its
    denominators. PPO (1707.06347), dual clip (1912.09729; INTELLECT-2's two-sided clip is the same function), high > low
    is clip-higher (DAPO, 2503.14476), drift is the off-policy sequence mask of DeepSeek-V3.2 (2512.02556).
    """
    plain, clipped = both_sides(ratio, advantages, low, high)
    loss = torch.maximum(plain, clipped)
    marks = {"pg_clipfrac": clipped > plain}
    if dual is not None:
        # A gain has no bound; where there is one it takes the gradient with it.
        bound = (advantages * -dual).masked_fill_(advantages >= 0, torch.inf)
        marks["pg_clipfrac_lower"] = loss > bound
        loss = torch.minimum(loss, bound)
    if drift is not None:
        drifted = view.mean(-log_ratio(view, anchor).detach()) > drift  # [S]
        marks["drift_dropped"] = (advantages < 0) & view.spread(drifted)
        loss = torch.where(marks["drift_dropped"], torch.zeros_like(loss), loss)
    return loss, marks


def both_sides(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """[M] -A r and -A clip(r, 1-low, 1+high), of which PPO takes the larger."""
    cost = -advantages
    return cost * ratio, cost * ratio.clamp(1 - low, 1 + high)
