"""Matrices in 4 bits on a GPU: all of one as plain numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from burnish.models.quantization.nf4 import Nf4

BYTES = 1024
"""Of codes that one program reads."""


@triton.jit
def _dequantise(
    codes_ptr,
    scales_ptr,
    ranges_ptr,
    values_ptr,
    out_ptr,
    num_bytes,
    num,
    DOUBLE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BYTES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BYTES
    at = first + tl.arange(0, BYTES)
    inside = at < num_bytes
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    block = at // HALF
    scale = tl.load(scales_ptr + block, mask=inside, other=0).to(tl.float32)
    if DOUBLE:
        low = tl.load(ranges_ptr + 2 * (block // GROUP), mask=inside, other=0.0)
        scale = low + tl.load(ranges_ptr + 2 * (block // GROUP) + 1, mask=inside, other=0.0) * scale
    upper = (tl.load(values_ptr + (code >> 4)) * scale).to(out_ptr.dtype.element_ty)
    lower = (tl.load(values_ptr + (code & 15)) * scale).to(out_ptr.dtype.element_ty)
    to = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + to, tl.interleave(upper, lower), mask=to < num)


def dequantise(matrix: Nf4, values: Tensor, dtype: torch.dtype, block: int, group: int) -> Tensor:
    """[outputs, inputs] in a type."""
    out = torch.empty(matrix.shape, dtype=dtype, device=matrix.codes.device)
    _dequantise[(triton.cdiv(matrix.codes.numel(), BYTES),)](
        matrix.codes,
        matrix.scales,
        values if matrix.ranges is None else matrix.ranges,
        values,
        out,
        matrix.codes.numel(),
        out.numel(),
        DOUBLE=matrix.ranges is not None,
        GROUP=group,
        HALF=block // 2,
        BYTES=BYTES,
        num_warps=4,
    )
    return out
