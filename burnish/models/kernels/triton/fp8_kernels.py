"""Quantisation of rows to 8-bit floats in one pass: the largest magnitude of a row, then its numbers divided by the scale."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, LONG_BLOCK = 2048, 4096
"""Numbers of a row that a program reads at once; the second of rows longer than `LONG_ROW`. The fastest on an H200."""
LONG_ROW = 16384
NUMBERS_PER_WARP = 256
"""Numbers of a block for each warp, eight for a thread."""


@triton.jit
def row_and_maximum(x_ptr, row, size, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """The first block of a row of `size` numbers, and the largest magnitude of the row."""
    column = tl.arange(0, BLOCK)
    first = tl.load(x_ptr + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    largest = tl.abs(first)
    for chunk in tl.static_range(1, CHUNKS):
        inside = chunk * BLOCK + column < size
        x = tl.load(x_ptr + row * size + chunk * BLOCK + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    return first, tl.max(largest, 0)


@triton.jit
def _quantise_rows(x_ptr, data_ptr, scale_ptr, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x, top = row_and_maximum(x_ptr, row, size, BLOCK, CHUNKS)
    scale = tl.where(top > 0, top * (1 / LARGEST), 1.0)
    tl.store(scale_ptr + row, scale)
    for chunk in tl.static_range(CHUNKS):
        inside = chunk * BLOCK + column < size
        if chunk > 0:  # the second read of a longer row comes from the cache
            x = tl.load(x_ptr + row * size + chunk * BLOCK + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(data_ptr + row * size + chunk * BLOCK + column, tl.div_rn(x, scale).to(tl.float8e4nv), mask=inside)


def quantise_rows(x: Tensor, data: Tensor, scale: Tensor, largest: float) -> None:
    """Quantise contiguous vectors x [..., D] into `data` [..., D] and `scale` [...]; `largest` is the largest 8-bit number."""
    size = x.shape[-1]
    rows = x.numel() // size if size else 0
    if rows:
        block, chunks, warps = row_blocks(size)
        _quantise_rows[(rows,)](x, data, scale, size, LARGEST=largest, BLOCK=block, CHUNKS=chunks, num_warps=warps)


def row_blocks(size: int) -> tuple[int, int, int]:
    """How a program reads a row of `size` numbers: numbers of a block, blocks, warps."""
    block = min(LONG_BLOCK if size > LONG_ROW else BLOCK, triton.next_power_of_2(size))
    return block, triton.cdiv(size, block), max(1, block // NUMBERS_PER_WARP)
