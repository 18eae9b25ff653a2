"""Quantisation for products in 8 bits that train (`kernels/fp8_linear.py`): rows in one pass, and columns of 8-bit rows in two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.models.kernels.fp8 import FP8, SCALED_PRODUCT_MULTIPLE, Fp8Rows
from burnish.models.kernels.triton.fp8_kernels import row_and_maximum, row_blocks

TILE = 128
"""Rows and columns that a program of `_transpose` reads."""
ROWS_PER_MAXIMUM = 512
"""Rows whose largest magnitudes a program of `_column_maxima` finds."""


@triton.jit
def _power_scale(largest):
    """`kernels.fp8_linear.power_scale`."""
    bits = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    scale = (tl.maximum(bits, 1) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(largest > 0, scale, 1.0)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def _quantise_rows(x_ptr, data_ptr, scale_ptr, size, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x, top = row_and_maximum(x_ptr, row, size, BLOCK, CHUNKS)
    scale = _power_scale(top)
    tl.store(scale_ptr + row, scale)
    for chunk in tl.static_range(CHUNKS):
        inside = chunk * BLOCK + column < size
        if chunk > 0:  # the second read of a longer row comes from the cache
            x = tl.load(x_ptr + row * size + chunk * BLOCK + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(data_ptr + row * size + chunk * BLOCK + column, (x / scale).to(tl.float8e4nv), mask=inside)


def quantise_by_powers(x: Tensor) -> Fp8Rows:
    """`burnish.models.kernels.fp8_linear.quantise_by_powers` of contiguous rows [N, D]."""
    rows, size = x.shape
    out = Fp8Rows(torch.empty_like(x, dtype=FP8), torch.empty(rows, dtype=torch.float32, device=x.device))
    if rows:
        block, chunks, warps = row_blocks(size)
        _quantise_rows[(rows,)](x, *out, size, BLOCK=block, CHUNKS=chunks, num_warps=warps)
    return out


@triton.jit
def _column_maxima(data_ptr, factor_ptr, maximum_ptr, rows, size, TILE: tl.constexpr, ROWS: tl.constexpr):
    """The largest magnitude of each column of these rows, as the bits of a float32, which order as the numbers do."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.program_id(1).to(tl.int64) * ROWS
    largest = tl.zeros([TILE], tl.float32)
    for start in range(0, ROWS, TILE):
        row = first + start + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        data = tl.load(data_ptr + row[:, None] * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(data) * factor[:, None], 0))
    tl.atomic_max(maximum_ptr + column, largest.to(tl.int32, bitcast=True), mask=column < size)


@triton.jit
def _transpose(
    data_ptr,
    factor_ptr,
    maximum_ptr,
    out_ptr,
    scale_ptr,
    rows,
    size,
    padded,
    RESCALED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    data = tl.load(data_ptr + row[:, None] * size + column[None, :], mask=inside, other=0.0)
    if RESCALED:
        largest = tl.load(maximum_ptr + column, mask=column < size, other=0).to(tl.float32, bitcast=True)
        scale = _power_scale(largest)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + column, scale, mask=column < size)
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)
        data = (data.to(tl.float32) * factor[:, None] / scale[None, :]).to(tl.float8e4nv)
    where = (column < size)[:, None] & (row < padded)[None, :]
    tl.store(out_ptr + column[:, None] * padded + row[None, :], tl.trans(data), mask=where)


def columns(rows: Tensor, factor: Tensor | None) -> Fp8Rows:
    """`burnish.models.kernels.fp8_linear.columns`; without a factor `plain_columns`, which moves bytes."""
    num, size = rows.shape
    padded = triton.cdiv(num, SCALED_PRODUCT_MULTIPLE) * SCALED_PRODUCT_MULTIPLE
    out = torch.empty(size, padded, dtype=FP8, device=rows.device)
    grid = (triton.cdiv(padded, TILE), triton.cdiv(size, TILE))
    if factor is None:
        scale = torch.ones(size, device=rows.device)
        moved, target = rows.view(torch.uint8), out.view(torch.uint8)
        _transpose[grid](moved, scale, scale, target, scale, num, size, padded, RESCALED=False, TILE=TILE, num_warps=4)
        return Fp8Rows(out, scale)
    maxima = torch.zeros(size, dtype=torch.int32, device=rows.device)
    chunks = (grid[1], triton.cdiv(num, ROWS_PER_MAXIMUM))
    _column_maxima[chunks](rows, factor, maxima, num, size, TILE=TILE, ROWS=ROWS_PER_MAXIMUM, num_warps=4)
    scale = torch.empty(size, dtype=torch.float32, device=rows.device)
    _transpose[grid](rows, factor, maxima, out, scale, num, size, padded, RESCALED=True, TILE=TILE, num_warps=4)
    return Fp8Rows(out, scale)
