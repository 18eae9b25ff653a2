"""A linear layer that trains with products in 8-bit floats: forward, gradient of the input, gradient of the weight.

All numbers are e4m3 (4 significant bits, largest 448) with one scale for each row, as in `fp8.py`, but scales are powers of two:

    row r of x = data[r] * scale[r],   scale[r] = the smallest power of two with max |x[r]| <= 448 scale[r]

A power of two changes no digit. A number is therefore rounded to the same value under every scale that keeps it above 2^-14 of its
row's largest magnitude; below that it loses digits, and below 2^-18 it is 0. Each tensor is rounded once, with scales of its own rows:

    y      = x W^T       sums over inputs      scales of the rows of x and of W
    grad_x = g W         sums over outputs     scales of the rows of g and of the columns of W
    grad_W = g^T x       sums over tokens      scales of the columns of g; x has those of its rows

`Fp8Rows.columns` gives the same numbers with scales of columns. In grad_W the scales of the rows of x cannot leave the sum, so they are
multiplied into g before its columns get theirs: what a token adds to the gradient then keeps its digits unless it is 2^-14 of the most
that a token adds. Scales of rows depend on their row alone. Scales of columns depend on the micro-batch, so that another split changes
only numbers below 2^-14 of the largest one of their column. No state goes from one step to the next.

The layer saves x in 8 bits, half of what a layer in bfloat16 saves. On a GPU with 8-bit tensor cores torch multiplies the 8-bit
numbers; elsewhere the same numbers are multiplied in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burnish.models.kernels.device import use_triton
from burnish.models.kernels.fp8 import FP8, Fp8Rows, scaled_product

MANTISSA_BITS = 23
LARGEST_BITS = 0x1FFFFF
"""Added to the bits of a float32, it carries into the exponent if the mantissa is above 1.75, that of 448 = 1.75 * 2^8."""
LARGEST_EXPONENT = 8
SMALLEST_EXPONENT_BITS = 1
"""Exponent bits of the smallest scale, 2^-126."""


def power_scale(largest: Tensor) -> Tensor:
    """The smallest power of two s with largest <= 448 s, in float32; 1 for 0, NaN for infinity and NaN."""
    bits = (largest.float().view(torch.int32) + LARGEST_BITS >> MANTISSA_BITS) - LARGEST_EXPONENT
    scale = (bits.clamp_min(SMALLEST_EXPONENT_BITS) << MANTISSA_BITS).view(torch.float32)
    scale = torch.where(largest > 0, scale, 1.0)
    return torch.where(largest.isfinite(), scale, torch.nan)


def quantise_by_powers(x: Tensor) -> Fp8Rows:
    """Quantise rows [N, D], the scale of each a power of two."""
    x = x.contiguous()
    if use_triton(x):
        from burnish.models.kernels.triton import fp8_linear_kernels

        return fp8_linear_kernels.quantise_by_powers(x)
    wide = x.float()
    scale = power_scale(wide.abs().amax(-1))
    return Fp8Rows((wide / scale[:, None]).to(FP8), scale)


def columns(rows: Tensor, factor: Tensor) -> Fp8Rows:
    """The columns [D, N] of the matrix rows[n] * factor[n], for e4m3 rows [N, D]; each has a power of two as its scale.

    The kernel pads them with zeros to a multiple of `SCALED_PRODUCT_MULTIPLE`, over which the GPU's product can sum.
    """
    if use_triton(rows):
        from burnish.models.kernels.triton import fp8_linear_kernels

        return fp8_linear_kernels.columns(rows, factor)
    wide = (rows.float() * factor[:, None]).t().contiguous()
    scale = power_scale(wide.abs().amax(-1))
    return Fp8Rows((wide / scale[:, None]).to(FP8), scale)


def plain_columns(rows: Tensor) -> Fp8Rows:
    """The columns [D, N] of e4m3 rows [N, D], as they are and padded as in `columns`; their scales are 1."""
    if use_triton(rows):
        from burnish.models.kernels.triton import fp8_linear_kernels

        return fp8_linear_kernels.columns(rows, None)
    data = rows.view(torch.uint8).t().contiguous().view(FP8)
    return Fp8Rows(data, torch.ones(data.shape[0], device=rows.device))


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, inputs] times weight [outputs, inputs]^T in 8 bits, without gradient."""
    return scaled_product(quantise_by_powers(x), quantise_by_powers(weight), x.dtype, bias)


def input_gradient_of(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [N, outputs] times weight [outputs, inputs] in 8 bits; [N, inputs]."""
    return input_gradient(quantise_by_powers(grad), weight, grad.dtype)


def input_gradient(grad: Fp8Rows, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`input_gradient_of` a gradient that is in 8 bits already."""
    small = quantise_by_powers(weight)
    return scaled_product(grad, columns(small.data, small.scale), dtype, fast_sum=False)


def weight_gradient(grad: Fp8Rows, x: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """grad [N, outputs]^T times x [N, inputs] in 8 bits; [outputs, inputs]."""
    return scaled_product(columns(grad.data, grad.scale * x.scale), plain_columns(x.data), dtype, fast_sum=False)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = quantise_by_powers(x)
        ctx.save_for_backward(weight, *(rows if ctx.needs_input_grad[1] else ()))
        return scaled_product(rows, quantise_by_powers(weight), x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight, *saved = ctx.saved_tensors
        grad = quantise_by_powers(grads[0])
        grad_x = input_gradient(grad, weight, grads[0].dtype) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(grad, Fp8Rows(*saved), weight.dtype) if saved else None
        return grad_x, grad_weight, grads[0].sum(0) if ctx.needs_input_grad[2] else None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer to rows [N, inputs] with its three products in 8 bits; [N, outputs]."""
    return _Fp8Linear.apply(x, weight, bias) if torch.is_grad_enabled() else product(x, weight, bias)
