"""Slot `loss`: samples of the policy and demonstrations of a stronger one in the same group."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.losses.sequences import logp_of
from burnish.algorithms.ratios import token as token_ratio
from burnish.algorithms.view import View

EPS = 1e-6
"""Added to an author's probability before dividing by it."""


def mixed_offpolicy(
    view: View,
    anchor: Tensor,
    advantages: Tensor,
    weight: Literal["shaped", "author", "mixture"] = "shaped",
    gamma: float = 0.1,
    focus: float = 0.0,
    clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A r on the policy's own tokens, -A w on demonstrated ones, r and w with gradient; the logarithm of r is clamped.

    With p the policy's probability of a demonstrated token, `weight` says what w is:

    - shaped: p / (p + gamma), whose gradient is largest near p = gamma, so that unlikely tokens are learnt rather than lost.
      LUFFY (2504.14945);
    - author: p / (q + 1e-6), where the probabilities q of whoever wrote the demonstration are known (`author_logp`);
    - mixture: 2 p / (p_old + q), as if a token could have come from either, with (p_old + 1) / 2 in the place of a q that
      nobody knows. RL-PLUS (2508.00222), which also has a `focus`: A (1 - p)^focus, without gradient, looks away from tokens
      that are likely already.

    `clip` bounds the policy's own tokens as PPO does. Reads the sequence column `demonstration` (bool), which a batch without
    any need not have.
    """
    logp, ratio = logp_of(view), token_ratio(view, anchor)
    own = -advantages * ratio
    if clip is not None:
        own = torch.maximum(own, -advantages * ratio.clamp(1 - clip, 1 + clip))
    if not view.has("demonstration"):
        return own, {"demonstrated": torch.zeros_like(logp, dtype=torch.bool)}
    shown = view.column("demonstration")
    if weight == "shaped":
        weights = (logp - math.log(gamma)).sigmoid()
    elif weight == "author":
        # The policy's own tokens may hold anything there, and NaN would leak into the gradient through the exponential.
        known = torch.where(shown, view.column("author_logp"), torch.zeros_like(logp))
        weights = logp.exp() / (known.exp() + EPS)
    else:
        old = torch.where(shown, anchor, torch.zeros_like(anchor)).exp()
        weights = 2 * logp.exp() / (old + (old + 1) / 2)
    aimed = advantages * (1 - logp.detach().exp()).clamp(min=0) ** focus if focus > 0 else advantages
    return torch.where(shown, -aimed * weights, own), {"demonstrated": shown}
