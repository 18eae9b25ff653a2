"""Slot `entropy`: what moves the bonus, which tokens learn, and how much reward is left to gain by giving entropy up."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def adaptive_coefficient(coef: float, entropy: float, target: float, delta: float) -> tuple[float, bool]:
    """The next coefficient and whether the bonus applies: up by delta at or below the target, down (to 0) above it.

    The bonus applies only at or below the target. Skywork-OR1 (2505.22312).
    """
    low = entropy <= target
    return (coef + delta if low else max(0.0, coef - delta)), low


def top_entropy_mask(entropy: Tensor, share: float) -> Tensor:
    """[M] bool: the tokens whose entropy is in the top `share` of those given.

    The threshold is the (1 - share) quantile, so that about share * M tokens are at or above it and at least one is.
    Tokens that tie with the threshold are all kept, also where rounding sets them apart: samples of a prompt begin with
    the same entropy, and which of them stay must not depend on what they were computed beside. High-entropy minority
    tokens (2506.01939).
    """
    num = entropy.numel()
    if num == 0:
        return torch.zeros_like(entropy, dtype=torch.bool)
    # The smallest value at or above the interpolated quantile; less a hair, for products such as 0.3 * 10 = 3.0000000000000004.
    rank = math.ceil((1 - share) * (num - 1) - 1e-9)
    threshold = entropy.kthvalue(rank + 1).values
    return entropy >= threshold - 1e-6 * (1 + threshold.abs())


def entropy_ceiling(entropy: Tensor, reward: Tensor) -> tuple[float, float, float]:
    """(a, b, b - a) of the least-squares fit R = -a exp(H) + b: the reward predicted for an entropy of 0.

    One point a step of a run. Entropy mechanism (2505.22617).
    """
    x, y = entropy.double().exp(), reward.double()
    spread = x - x.mean()
    if float((spread**2).sum()) == 0:
        raise ValueError("the entropy ceiling is the end of a line: it needs at least two different entropies")
    a = -float((spread * y).sum() / (spread**2).sum())
    b = float(y.mean() + a * x.mean())
    return a, b, b - a
