"""Slots `ratio`, `clip` and `loss`: the per-token policy loss.

Pure functions of tensors [M] over tokens. The ratio's logarithm is clamped to +-20 before the exponential, with no
gradient outside, so one absurd token cannot overflow a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_ratio(logp: Tensor, anchor: Tensor) -> Tensor:
    """[M] importance ratio of each token."""
    return (logp - anchor).clamp(-20, 20).exp()


def ppo_clip(
    ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] max(-A r, -A clip(r, 1-low, 1+high)), for A < 0 at most -A*dual; and which tokens each bound acts on.

    PPO (1707.06347), dual clip (1912.09729), high > low is clip-higher (DAPO, 2503.14476).
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    marks = {"pg_clipfrac": clipped > plain}
    if dual is not None:
        bound = -advantages * dual
        marks["pg_clipfrac_lower"] = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, marks


def no_clip(ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A r."""
    return -advantages * ratio, {}


def logprob_loss(logp: Tensor, advantages: Tensor) -> Tensor:
    """[M] -A logp: plain policy gradient."""
    return -advantages * logp


RATIOS = {"token": token_ratio, "none": None}
CLIPS = {"ppo": ppo_clip, "none": no_clip}
