"""Quantisation of rows to 8-bit floats in one pass: the largest magnitude of a row, then its numbers divided by the scale."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Numbers of a row that a program reads at once."""


@triton.jit
def row_maximum(x_ptr, row, size, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """The largest magnitude of a row of `size` numbers."""
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        inside = chunk * BLOCK + column < size
        x = tl.load(x_ptr + row * size + chunk * BLOCK + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    return tl.max(largest, 0)


@triton.jit
def _quantise_rows(x_ptr, data_ptr, scale_ptr, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    top = row_maximum(x_ptr, row, size, BLOCK, CHUNKS)
    scale = tl.where(top > 0, top * (1 / LARGEST), 1.0)
    tl.store(scale_ptr + row, scale)
    for chunk in tl.static_range(CHUNKS):  # the second read of the row comes from the cache
        inside = chunk * BLOCK + column < size
        x = tl.load(x_ptr + row * size + chunk * BLOCK + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(data_ptr + row * size + chunk * BLOCK + column, tl.div_rn(x, scale).to(tl.float8e4nv), mask=inside)


def quantise_rows(x: Tensor, data: Tensor, scale: Tensor, largest: float) -> None:
    """Quantise contiguous vectors x [..., D] into `data` [..., D] and `scale` [...]; `largest` is the largest 8-bit number."""
    size = x.shape[-1]
    rows = x.numel() // size if size else 0
    if rows:
        block = min(BLOCK, triton.next_power_of_2(size))
        chunks = triton.cdiv(size, block)
        _quantise_rows[(rows,)](x, data, scale, size, LARGEST=largest, BLOCK=block, CHUNKS=chunks, num_warps=4)
