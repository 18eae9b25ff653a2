"""Uniform numbers for sampling, a pure function of (key, position), vectorised over rows.

The torch twin of `burnish.core.keys`: integer arithmetic on int64 wraps, so every device gives the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from burnish.core.keys import GOLDEN, MULTIPLIER_1, MULTIPLIER_2


def signed(value: int) -> int:
    """An unsigned 64-bit integer as the int64 with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(x: Tensor) -> Tensor:
    # torch shifts int64 arithmetically; the masks make the shifts logical.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(MULTIPLIER_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(MULTIPLIER_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, for int64 `keys` and the position each is drawn for."""
    if keys.device.type == "cpu":  # the same bits; for a few rows numpy's calls cost a tenth of torch's
        return torch.from_numpy(_uniforms_numpy(keys.numpy(), positions.numpy()))
    bits = _mix(keys + (positions + 1) * signed(GOLDEN))
    # 52 bits and a half fill a float64's 53: one bit more and the half would round the last number up to 1.
    return (((bits >> 12) & ((1 << 52) - 1)).to(torch.float64) + 0.5) * 2.0**-52


def _uniforms_numpy(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    x = keys.view(np.uint64) + (positions.view(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
