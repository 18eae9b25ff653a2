"""Matrices in 4 bits on a GPU: all of one as plain numbers, and a product of few rows that reads the codes themselves.

A decode step of a few rows is bound by what it reads of the weights; through the codes that is a quarter of half types, and
no dense matrix is written. Both give and use the same numbers, rounded to the type of the arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.models.ops.nf4 import BLOCK, GROUP, Nf4

BYTES = 1024
"""Of codes that one program of the first kernel reads."""
ROWS, COLUMNS = 16, 32
"""The least tile of a program of the second: tensor cores take no fewer rows. With more rows it has more columns: each reads all of x."""


@triton.jit
def _scale(scales_ptr, ranges_ptr, block, inside, DOUBLE: tl.constexpr, GROUP: tl.constexpr):
    scale = tl.load(scales_ptr + block, mask=inside, other=0).to(tl.float32)
    if DOUBLE:
        low = tl.load(ranges_ptr + 2 * (block // GROUP), mask=inside, other=0.0)
        scale = low + tl.load(ranges_ptr + 2 * (block // GROUP) + 1, mask=inside, other=0.0) * scale
    return scale


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
    scale = _scale(scales_ptr, ranges_ptr, at // HALF, inside, DOUBLE, GROUP)
    upper = (tl.load(values_ptr + (code >> 4)) * scale).to(out_ptr.dtype.element_ty)
    lower = (tl.load(values_ptr + (code & 15)) * scale).to(out_ptr.dtype.element_ty)
    to = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + to, tl.interleave(upper, lower), mask=to < num)


@triton.jit
def _linear(
    even_ptr,
    odd_ptr,
    codes_ptr,
    scales_ptr,
    ranges_ptr,
    values_ptr,
    bias_ptr,
    out_ptr,
    rows,
    size,
    num_blocks,
    HAS_BIAS: tl.constexpr,
    DOUBLE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # A byte holds two neighbours: those of the upper halves meet the even inputs, the others the odd ones.
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, HALF)
    has_row, has_column = row < rows, column < size
    first = column.to(tl.int64) * num_blocks
    x_at = row[:, None] * (num_blocks * HALF) + k[None, :]
    codes_at = codes_ptr + first[None, :] * HALF + k[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, num_blocks):
        code = tl.load(codes_at + block * HALF, mask=has_column[None, :], other=0).to(tl.int32)
        scale = _scale(scales_ptr, ranges_ptr, first + block, has_column, DOUBLE, GROUP)[None, :]
        even = tl.load(even_ptr + x_at + block * HALF, mask=has_row[:, None], other=0.0)
        odd = tl.load(odd_ptr + x_at + block * HALF, mask=has_row[:, None], other=0.0)
        upper = (tl.load(values_ptr + (code >> 4)) * scale).to(even.dtype)
        lower = (tl.load(values_ptr + (code & 15)) * scale).to(even.dtype)
        sums = tl.dot(odd, lower, tl.dot(even, upper, sums))
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row[:, None] * size + column[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def dequantise(matrix: Nf4, values: Tensor, dtype: torch.dtype) -> Tensor:
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
        GROUP=GROUP,
        HALF=BLOCK // 2,
        BYTES=BYTES,
        num_warps=4,
    )
    return out


def linear(x: Tensor, matrix: Nf4, values: Tensor, bias: Tensor | None) -> Tensor:
    """Few rows [N, inputs] to [N, outputs]; the inputs are whole blocks."""
    rows, depth = x.shape
    size = matrix.shape[0]
    tall = max(ROWS, triton.next_power_of_2(rows))
    wide = COLUMNS if tall == ROWS else 2 * COLUMNS
    even, odd = x.view(rows, depth // 2, 2).permute(2, 0, 1).contiguous()
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _linear[(triton.cdiv(size, wide),)](
        even,
        odd,
        matrix.codes,
        matrix.scales,
        values if matrix.ranges is None else matrix.ranges,
        values,
        x if bias is None else bias,
        out,
        rows,
        size,
        depth // BLOCK,
        HAS_BIAS=bias is not None,
        DOUBLE=matrix.ranges is not None,
        GROUP=GROUP,
        HALF=BLOCK // 2,
        ROWS=tall,
        COLUMNS=wide,
        num_warps=4,
        num_stages=4,
    )
    return out
