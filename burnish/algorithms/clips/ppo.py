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
    # The larger of the two costs is that of the ratio bounded on one side, and one clamp is half the work of two maxima.
    floor, ceiling = one_sided(advantages, 1 - low, 1 + high, dual)
    loss = -advantages * torch.clamp(ratio, floor, ceiling)
    below, above = ratio.detach() < floor, ratio.detach() > ceiling
    marks = {"pg_clipfrac": (above & (advantages > 0)).logical_or_(below & (advantages < 0))}
    if dual is not None:
        marks["pg_clipfrac_lower"] = above & (advantages < 0)
    if drift is not None:
        drifted = view.mean(-log_ratio(view, anchor).detach()) > drift  # [S]
        marks["drift_dropped"] = (advantages < 0) & view.spread(drifted)
        loss = torch.where(marks["drift_dropped"], torch.zeros_like(loss), loss)
    return loss, marks


def one_sided(advantages: Tensor, low: float, high: float, highest: float | None = None) -> tuple[Tensor, Tensor]:
    """[M] the range of a ratio or its logarithm that keeps a gradient: up to `high` where A > 0, else from `low` on.

    `highest` bounds the second from above.
    """
    gain = advantages > 0
    floor = torch.full_like(advantages, low).masked_fill_(gain, -torch.inf)
    return floor, torch.full_like(advantages, torch.inf if highest is None else highest).masked_fill_(gain, high)
