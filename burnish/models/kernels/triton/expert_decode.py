"""Kernels of experts for a pass without gradient: the choice of experts, the order of their rows, and products of few rows.

A decode step has 10 to 100 rows of each expert, and its time is that of reading all matrices once. A tile of the products
therefore has many columns of one expert's matrix and few rows; the matrix is the left operand, because the tensor cores take
at least 64 rows on that side and 8 on the other. `gate_up` gathers its input by token, and applies the activation and the
weight of each row before it writes. Nothing is read on the host, so that CUDA graphs can record all of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS_BLOCK = 1024
ROUTE_TOKENS = 4


class Tile(NamedTuple):
    """Sizes of a product's tile, and how its loop is compiled."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


# Best tiles for a mean number of rows of an expert, measured on an H200 (`bench/expert_kernels.py --tiles`).
GATE_UP_TILES = {
    4: Tile(16, 64, 64, 5, 4),
    16: Tile(32, 64, 64, 5, 4),
    32: Tile(64, 128, 64, 4, 8),
    64: Tile(128, 128, 64, 4, 8),
    128: Tile(128, 128, 64, 4, 8),
}
DOWN_TILES = {
    4: Tile(16, 128, 128, 3, 8),
    16: Tile(32, 64, 64, 5, 4),
    32: Tile(64, 128, 64, 4, 4),
    64: Tile(64, 128, 64, 4, 4),
    128: Tile(64, 128, 64, 4, 4),
}


def best_tile(tiles: dict[int, Tile], rows_per_expert: float) -> Tile:
    """The tile for the nearest mean number of rows."""
    return tiles[min(tiles, key=lambda rows: abs(math.log(rows / max(rows_per_expert, 1.0))))]


# --- the choice ----------------------------------------------------------------------------------------------------------


@triton.jit
def _route(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    num_tokens,
    scale,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    NORMALISED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    index = tl.arange(0, EXPERTS_BLOCK)
    is_token = token < num_tokens
    at = logits_ptr + token.to(tl.int64)[:, None] * EXPERTS + index[None, :]
    logits = tl.load(at, mask=is_token[:, None] & (index < EXPERTS)[None, :], other=float("-inf")).to(tl.float32)
    logits = tl.where(is_token[:, None], logits, 0.0)
    powers = tl.exp(logits - tl.max(logits, 1)[:, None])
    scores = tl.where((index < EXPERTS)[None, :], powers / tl.sum(powers, 1)[:, None], -1.0)
    slot = tl.arange(0, CHOSEN_BLOCK)
    experts = tl.zeros([TOKENS, CHOSEN_BLOCK], tl.int32)
    weights = tl.zeros([TOKENS, CHOSEN_BLOCK], tl.float32)
    for k in range(CHOSEN):
        best, which = tl.max(scores, 1, return_indices=True)
        experts = tl.where((slot == k)[None, :], which[:, None], experts)
        weights = tl.where((slot == k)[None, :], best[:, None], weights)
        scores = tl.where(index[None, :] == which[:, None], -1.0, scores)
    if NORMALISED:
        weights = weights / tl.sum(weights, 1)[:, None]
    out = token.to(tl.int64)[:, None] * CHOSEN + slot[None, :]
    inside = is_token[:, None] & (slot < CHOSEN)[None, :]
    tl.store(experts_ptr + out, experts.to(tl.int64), mask=inside)
    tl.store(weights_ptr + out, weights * scale, mask=inside)


def route(logits: Tensor, num_chosen: int, is_normalised: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The experts [N, k] with the largest softmax of the logits [N, E], the best first, and their weights in float32."""
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(triton.cdiv(num_tokens, ROUTE_TOKENS),)](
            logits.contiguous(),
            experts,
            weights,
            num_tokens,
            scale,
            EXPERTS=num_experts,
            EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
            CHOSEN=num_chosen,
            CHOSEN_BLOCK=triton.next_power_of_2(num_chosen),
            NORMALISED=is_normalised,
            TOKENS=ROUTE_TOKENS,
            num_warps=4,
        )
    return experts, weights


# --- the order of the rows -----------------------------------------------------------------------------------------------


@triton.jit
def _sort_pairs(
    experts_ptr, tokens_ptr, slots_ptr, rows_ptr, ends_ptr, num_pairs, CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for block in range(0, tl.cdiv(num_pairs, BLOCK)):
        pair = block * BLOCK + index
        chosen = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=1 << 30)
        before += (chosen < expert).to(tl.int32)
    row = tl.sum(before, 0)
    for block in range(0, tl.cdiv(num_pairs, BLOCK)):
        pair = block * BLOCK + index
        chosen = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=1 << 30)
        is_own = chosen == expert
        own_row = (row + tl.cumsum(is_own.to(tl.int32), 0) - 1).to(tl.int64)
        tl.store(tokens_ptr + own_row, (pair // CHOSEN).to(tl.int64), mask=is_own)
        tl.store(slots_ptr + own_row, pair.to(tl.int64), mask=is_own)
        tl.store(rows_ptr + pair, own_row, mask=is_own)
        row += tl.sum(is_own.to(tl.int32), 0)
    tl.store(ends_ptr + expert, row)


def sort_pairs(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`experts.dispatch` in one kernel: the token and the pair of each sorted row, the row of each pair, the ends."""
    num_pairs, chosen = experts.numel(), experts.shape[1]
    tokens, slots = (torch.empty(num_pairs, dtype=torch.int64, device=experts.device) for _ in range(2))
    rows = torch.empty(experts.shape, dtype=torch.int64, device=experts.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    _sort_pairs[(num_experts,)](
        experts.contiguous(), tokens, slots, rows, ends, num_pairs, CHOSEN=chosen, BLOCK=PAIRS_BLOCK, num_warps=4
    )
    return tokens, slots, rows, ends


# --- products of few rows ------------------------------------------------------------------------------------------------


@triton.jit
def _own_rows(ends_ptr, tile, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile, its first row and the end of its expert's rows. An expert of EXPERTS: the tile has no rows."""
    index = tl.arange(0, EXPERTS_BLOCK)
    is_real = index < EXPERTS
    ends = tl.load(ends_ptr + index, mask=is_real, other=0)
    starts = tl.load(ends_ptr + index - 1, mask=is_real & (index > 0), other=0)
    tiles = tl.where(is_real, (ends - starts + ROWS - 1) // ROWS, 0)
    last_tiles = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where(is_real & (last_tiles <= tile), 1, 0), 0)
    is_own = index == expert
    first_tile = tl.sum(tl.where(is_own, last_tiles - tiles, 0), 0)
    start = tl.sum(tl.where(is_own, starts, 0), 0)
    end = tl.sum(tl.where(is_own, ends, 0), 0)
    return expert, start + (tile - first_tile) * ROWS, end


@triton.jit
def _gate_up(
    x_ptr,
    weight_ptr,
    ends_ptr,
    tokens_ptr,
    slots_ptr,
    row_weights_ptr,
    out_ptr,
    size,
    depth,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert, first, end = _own_rows(ends_ptr, tl.program_id(0), EXPERTS, EXPERTS_BLOCK, ROWS)
    if expert >= EXPERTS:  # the grid has room for the worst distribution
        return
    row = first + tl.arange(0, ROWS)
    is_row = row < end
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.minimum(column, size - 1)
    k = tl.arange(0, DEPTH)
    token = tl.load(tokens_ptr + row, mask=is_row, other=0)
    x_at = x_ptr + token[None, :] * depth + k[:, None]
    gate_at = weight_ptr + (expert.to(tl.int64) * 2 * size + inside)[:, None] * depth + k[None, :]
    up_at = gate_at + size * depth
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(0, tl.cdiv(depth, DEPTH)):
        left = depth - step * DEPTH
        x = tl.load(x_at, mask=(k < left)[:, None] & is_row[None, :], other=0.0)
        gate = tl.dot(tl.load(gate_at, mask=(k < left)[None, :], other=0.0), x, gate)
        up = tl.dot(tl.load(up_at, mask=(k < left)[None, :], other=0.0), x, up)
        x_at += DEPTH
        gate_at += DEPTH
        up_at += DEPTH
    # As the products and the activation in separate kernels round: each to the dtype of the output.
    dtype = out_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate)) * up).to(dtype)
    row_weight = tl.load(row_weights_ptr + tl.load(slots_ptr + row, mask=is_row, other=0), mask=is_row, other=0.0)
    at = out_ptr + row.to(tl.int64)[None, :] * size + column[:, None]
    tl.store(at, activated * row_weight.to(dtype)[None, :], mask=is_row[None, :] & (column < size)[:, None])


def gate_up(
    x: Tensor,
    matrices: Tensor,
    weights: Tensor,
    tokens: Tensor,
    slots: Tensor,
    ends: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """silu(gate) * up of each sorted row, times its weight of [N, k]: tokens [N, depth] -> [M, size]."""
    experts, twice, depth = matrices.shape
    size, num_rows = twice // 2, tokens.shape[0]
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    tile = tile or best_tile(GATE_UP_TILES, num_rows / experts)
    if num_rows:
        _gate_up[(_num_tiles(num_rows, experts, tile.rows), triton.cdiv(size, tile.columns))](
            x.contiguous(),
            matrices,
            ends,
            tokens,
            slots,
            weights.contiguous(),
            out,
            size,
            depth,
            EXPERTS=experts,
            EXPERTS_BLOCK=triton.next_power_of_2(experts),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


@triton.jit
def _down(
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
):
    expert, first, end = _own_rows(ends_ptr, tl.program_id(0), EXPERTS, EXPERTS_BLOCK, ROWS)
    if expert >= EXPERTS:
        return
    row = first + tl.arange(0, ROWS)
    is_row = row < end
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.minimum(column, size - 1)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + row.to(tl.int64)[None, :] * depth + k[:, None]
    weight_at = weight_ptr + (expert.to(tl.int64) * size + inside)[:, None] * depth + k[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(0, tl.cdiv(depth, DEPTH)):
        left = depth - step * DEPTH
        x = tl.load(x_at, mask=(k < left)[:, None] & is_row[None, :], other=0.0)
        sums = tl.dot(tl.load(weight_at, mask=(k < left)[None, :], other=0.0), x, sums)
        x_at += DEPTH
        weight_at += DEPTH
    at = out_ptr + row.to(tl.int64)[None, :] * size + column[:, None]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & (column < size)[:, None])


def down(rows: Tensor, matrices: Tensor, ends: Tensor, tile: Tile | None = None) -> Tensor:
    """Sorted rows [M, depth] times the transposed matrices [E, size, depth] of their experts; [M, size]."""
    experts, size, depth = matrices.shape
    out = torch.empty(rows.shape[0], size, dtype=rows.dtype, device=rows.device)
    tile = tile or best_tile(DOWN_TILES, rows.shape[0] / experts)
    if rows.shape[0]:
        _down[(_num_tiles(rows.shape[0], experts, tile.rows), triton.cdiv(size, tile.columns))](
            rows,
            matrices,
            ends,
            out,
            size,
            depth,
            EXPERTS=experts,
            EXPERTS_BLOCK=triton.next_power_of_2(experts),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def _num_tiles(num_rows: int, experts: int, rows_of_tile: int) -> int:
    """Tiles for any distribution of rows: each expert has at most one tile that is not full."""
    return min(num_rows, triton.cdiv(num_rows, rows_of_tile) + experts)
