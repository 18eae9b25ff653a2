"""A linear layer whose every row is computed alike, whatever rows stand beside it.

The tile and the order over the depth are fixed; no split of the depth, no choice by the number of rows. A row's result then
depends on the row and the weights alone, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 64, 128, 64


@triton.jit
def _exact(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    size,
    depth,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The tiles of one stripe of columns come one after the other: they share its weights in the cache.
    tall = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % tall) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // tall) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + (row % rows).to(tl.int64)[:, None] * depth + k[None, :]
    weight_at = weight_ptr + (column % size).to(tl.int64)[None, :] * depth + k[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(0, tl.cdiv(depth, DEPTH)):
        left = depth - step * DEPTH
        x = tl.load(x_at, mask=k[None, :] < left, other=0.0)
        weight = tl.load(weight_at, mask=k[:, None] < left, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < size)[None, :])


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, depth] rows through a weight [size, depth]; [N, size]."""
    rows, depth = x.shape
    size = weight.shape[0]
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _exact[(triton.cdiv(rows, ROWS) * triton.cdiv(size, COLUMNS),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        size,
        depth,
        HAS_BIAS=bias is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=4 if x.dtype != torch.float32 else 2,
    )
    return out
