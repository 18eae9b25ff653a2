"""Rotary position embeddings (Su et al., 2104.09864) in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from burnish.models.ops.cpu import rows
from burnish.models.ops.cpu.build import kernels


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """[head_dim/2] angular frequencies, float32, with linear or Llama-3 scaling applied."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return inverse
    if scaling["rope_type"] == "linear":
        return inverse / scaling["factor"]
    # Llama 3: long wavelengths are stretched by `factor`, short ones kept, with a linear blend between.
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, smooth, scaled)


def rotation_table(num_positions: int, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin for each position, [P, 1, head_dim]: `x * cos + swap_halves(x) * sin` is the rotation."""
    angles = torch.arange(num_positions, device=inverse.device, dtype=torch.float32)[:, None] * inverse
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, way: float = 1.0) -> Tensor:
    library = kernels(x, cos, sin)
    if library is not None:
        return rows.rotate(library, x, cos, sin, way)
    sin = sin if way == 1.0 else -sin
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class _Rotate(torch.autograd.Function):
    """A rotation's backward is the rotation the other way: nothing but the table is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1.0), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [N, H, D] by the rows of the table already chosen for their positions."""
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate(x, cos, sin)
