"""One model out of several, tensor by tensor and without training: averages and spherical interpolation.

Kimi k1.5 (2501.12599) averages a long-thinking model with a short one (long2short). Sums are made in float32 at least,
whatever the tensors' type; a weight of 0 leaves a tensor out, so that weights 1 and 0 give the first one bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PARALLEL = 1e-6
"""Angles below this are interpolated along a line, which is the same there and divides by nothing."""


def average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i tensor_i, in float32 (float64 for such tensors)."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    used = [(t.to(wide), w) for t, w in zip(tensors, weights, strict=True) if w != 0]
    total = used[0][0] * used[0][1]
    for tensor, weight in used[1:]:
        total += tensor * weight
    return total


def angle(dot: float, square_a: float, square_b: float) -> float:
    """The angle between two vectors of which a.b, a.a and b.b are known; 0 where one of them is all zeros."""
    norms = math.sqrt(square_a) * math.sqrt(square_b)
    return math.acos(max(-1.0, min(1.0, dot / norms))) if norms else 0.0


def slerp_weights(theta: float, share: float) -> tuple[float, float]:
    """The weights of a and b on the arc between them, `share` of the way to b (Shoemake 1985).

    sin((1 - t) theta) / sin(theta) and sin(t theta) / sin(theta). Opposite vectors have no one arc: those too go along
    the line.
    """
    if share in (0.0, 1.0) or min(theta, math.pi - theta) < PARALLEL:
        return 1 - share, share
    return math.sin((1 - share) * theta) / math.sin(theta), math.sin(share * theta) / math.sin(theta)
