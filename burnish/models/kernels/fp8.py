"""Matrices and rows in 8-bit floats (e4m3) with one float32 scale for each row, and their products.

    row r of x = data[r] * scale[r],   scale[r] = max |x[r]| / 448      (1 for a row of zeros)

The scale maps a row's largest magnitude to the largest e4m3 number, so no calibration is needed, and an outlier of one row costs
no other row precision. In a product of rows and a matrix both factors have their scales along the outputs, so that they leave the
sum: out[r, c] = scale_x[r] * scale_w[c] * sum_k x[r, k] w[c, k]. A GPU with 8-bit tensor cores multiplies the 8-bit numbers;
elsewhere torch multiplies the same numbers in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.models.kernels.device import use_triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest e4m3 number."""
FP8_SCALE_BYTES = 4
FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU multiplies 8-bit floats (Ada, Hopper)."""
SCALED_PRODUCT_MULTIPLE = 16
"""The GPU's product needs inputs and outputs that are multiples of this."""


class Fp8Rows(NamedTuple):
    """Vectors [..., D] as e4m3 numbers with a scale each."""

    data: Tensor  # [..., D] e4m3
    scale: Tensor  # [...] float32

    @property
    def shape(self) -> torch.Size:
        """Shape of the vectors."""
        return self.data.shape


def empty_rows(shape: Sequence[int], device: torch.device) -> Fp8Rows:
    """Memory for vectors [..., D]."""
    data = torch.empty(*shape, dtype=FP8, device=device)
    return Fp8Rows(data, torch.empty(shape[:-1], dtype=torch.float32, device=device))


def quantise_rows(x: Tensor) -> Fp8Rows:
    """Quantise vectors [..., D], one scale for each."""
    if use_triton(x) and x.is_contiguous():
        from burnish.models.kernels.triton import fp8_kernels

        rows = empty_rows(x.shape, x.device)
        fp8_kernels.quantise_rows(x, rows.data, rows.scale, FP8_MAX)
        return rows
    wide = x.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest > 0, largest * (1 / FP8_MAX), 1.0)
    return Fp8Rows((wide / scale[..., None]).to(FP8), scale)


def dequantised(rows: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] as `dtype`."""
    return (rows.data.float() * rows.scale[..., None]).to(dtype)


def has_scaled_product(x: Tensor, outputs: int) -> bool:
    """Whether the GPU multiplies rows like x [N, inputs] in 8 bits by a matrix of so many outputs."""
    return (
        x.is_cuda
        and x.shape[1] % SCALED_PRODUCT_MULTIPLE == 0
        and outputs % SCALED_PRODUCT_MULTIPLE == 0
        and torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY
    )


def scaled_product(
    x: Fp8Rows, weight: Fp8Rows, dtype: torch.dtype, bias: Tensor | None = None, fast_sum: bool = True
) -> Tensor:
    """Rows [N, inputs] times a matrix [outputs, inputs], plus a bias [outputs]; [N, outputs] of `dtype`.

    The GPU's product gives bfloat16; another dtype is computed as elsewhere. Hopper's tensor cores keep 14 bits of a sum of 8-bit
    products (DeepSeek-V3, 2412.19437); without `fast_sum` partial sums are added in float32.
    """
    if has_scaled_product(x.data, weight.shape[0]) and dtype == torch.bfloat16:
        return torch._scaled_mm(
            x.data,
            weight.data.t(),
            scale_a=x.scale[:, None],
            scale_b=weight.scale[None, :],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast_sum,
        )
    out = (x.data.float() @ weight.data.float().t()) * x.scale[:, None] * weight.scale
    return (out if bias is None else out + bias).to(dtype)
