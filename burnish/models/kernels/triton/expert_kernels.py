"""Kernels of experts: the product of sorted rows with their experts' matrices, and the sum over the slots of tokens.

A tile of the product has rows of one expert only. Every program finds its expert by counting tiles, so the grid depends on
the sizes alone and nothing is read on the host. Tile and order over the depth are fixed, without split-K: the result of a
row has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 32, 128, 64
"""Tile of the product. A decode step has a few rows of each expert."""
SUM_BLOCK = 1024


@triton.jit
def _grouped_product(
    x_ptr,
    weight_ptr,
    ends_ptr,
    out_ptr,
    size,
    depth,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.arange(0, EXPERTS_BLOCK)
    is_real = index < EXPERTS
    ends = tl.load(ends_ptr + index, mask=is_real, other=0)
    starts = tl.load(ends_ptr + index - 1, mask=is_real & (index > 0), other=0)
    tiles = tl.where(is_real, (ends - starts + ROWS - 1) // ROWS, 0)
    last_tiles = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where(is_real & (last_tiles <= tile), 1, 0), 0)
    if expert >= EXPERTS:  # the grid has room for the worst distribution
        return
    first_tile = tl.sum(tl.where(index == expert, last_tiles - tiles, 0), 0)
    start = tl.sum(tl.where(index == expert, starts, 0), 0)
    end = tl.sum(tl.where(index == expert, ends, 0), 0)

    row = start + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + tl.minimum(row, end - 1).to(tl.int64)[:, None] * depth + k[None, :]
    weight_row = expert.to(tl.int64) * size + column % size
    weight_at = weight_ptr + weight_row[None, :] * depth + k[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(0, tl.cdiv(depth, DEPTH)):
        left = depth - step * DEPTH
        x = tl.load(x_at, mask=k[None, :] < left, other=0.0)
        weight = tl.load(weight_at, mask=k[:, None] < left, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH
    at = out_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < size)[None, :])


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows [M, depth] times the transposed matrices [E, size, depth] of their experts; [M, size]."""
    experts, size, depth = matrices.shape
    out = torch.empty(rows.shape[0], size, dtype=rows.dtype, device=rows.device)
    if not rows.shape[0]:
        return out
    # Each expert has at most one tile that is not full.
    tiles = min(rows.shape[0], triton.cdiv(rows.shape[0], ROWS) + experts)
    _grouped_product[(tiles, triton.cdiv(size, COLUMNS))](
        rows.contiguous(),
        matrices.contiguous(),
        ends,
        out,
        size,
        depth,
        EXPERTS=experts,
        EXPERTS_BLOCK=triton.next_power_of_2(experts),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=4 if rows.dtype != torch.float32 else 2,
    )
    return out


@triton.jit
def _sum_slots(outputs_ptr, rows_ptr, out_ptr, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(SLOTS):
        row = tl.load(rows_ptr + token * SLOTS + slot).to(tl.int64)
        total += tl.load(outputs_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_slots(outputs: Tensor, rows: Tensor) -> Tensor:
    """The sum of each token's outputs in the order of its slots, in float32: [M, width] -> [N, width]."""
    num_tokens, slots = rows.shape
    width = outputs.shape[1]
    out = torch.empty(num_tokens, width, dtype=outputs.dtype, device=outputs.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, SUM_BLOCK))
        _sum_slots[grid](outputs.contiguous(), rows.contiguous(), out, width, SLOTS=slots, BLOCK=SUM_BLOCK, num_warps=4)
    return out
