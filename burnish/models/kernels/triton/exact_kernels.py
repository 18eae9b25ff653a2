"""Batch-invariant kernels: paged attention and linear layers whose rows have the same bits in any batch.

Attention: a program has the query heads of one token that share a key head. It loops over that head's pages with an
online softmax, in blocks of one size from the first key to the last, without splits. Linear: the tile and the order over
the depth are fixed, without split-K. Nothing is chosen by the number of rows, so a result depends bit for bit only on the
token and its past, or on the row and the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.models.kernels.paged_cache import Placement

LOG2_E = 1.4426950408889634
BLOCK = 64
"""Keys per loop step of attention."""
ROWS, COLUMNS, DEPTH = 64, 128, 64
"""Tile of the linear layer."""


@triton.jit
def _exact_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    owner_ptr,
    position_ptr,
    last_ptr,
    out_ptr,
    scale,
    table_stride,
    window,
    softcap,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    pages_ptr = table_ptr + tl.load(owner_ptr + row) * table_stride
    length = (tl.load(last_ptr + row) + 1).to(tl.int32)  # 0 for an empty row
    first = tl.maximum(0, (tl.load(position_ptr + row) + 1).to(tl.int32) - window)

    query = tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM_BLOCK)
    real = (query < SHARED)[:, None] & (dim < DIM)[None, :]
    where = ((row * KV_HEADS + head) * SHARED + query)[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + where, mask=real, other=0.0)

    best = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
    for begin in range(first, length, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        seen = index < length
        page = tl.load(pages_ptr + index // PAGE, mask=seen, other=0).to(tl.int64)
        slot = (page * KV_HEADS + head) * PAGE + index % PAGE
        at = slot[:, None] * DIM + dim[None, :]
        inside = seen[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys_ptr + at, mask=inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAPPED:  # cap * tanh(score / cap), both in units of log2(e)
            scores = softcap - 2.0 * softcap / (1.0 + tl.exp(2.0 * scores / softcap))
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(values_ptr + at, mask=inside, other=0.0).to(q.dtype)
        sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        best = top

    out = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=real)


def exact_attention(
    q: Tensor, keys: Tensor, values: Tensor, placement: Placement, window: int | None, softcap: float | None = None
) -> Tensor:
    """Attention of each query over the pages of its row up to its own position or `placement.last`; [N, heads, D]."""
    rows, heads, dim = q.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    shared = heads // kv_heads
    out = torch.empty_like(q)
    block = triton.next_power_of_2(dim)
    _exact_attention[(rows, kv_heads)](
        q,
        keys,
        values,
        placement.table,
        placement.owner,
        placement.position,
        placement.position if placement.last is None else placement.last,
        out,
        dim**-0.5 * LOG2_E,
        placement.table.stride(0),
        window if window is not None else 1 << 30,
        0.0 if softcap is None else softcap * LOG2_E,
        KV_HEADS=kv_heads,
        SHARED=shared,
        QUERIES=max(16, triton.next_power_of_2(shared)),
        DIM=dim,
        DIM_BLOCK=max(16, block),
        PAGE=page,
        BLOCK=BLOCK,
        SOFTCAPPED=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=2,
        # With heads of 256 one stage less fits in shared memory.
        num_stages=(3 if q.dtype != torch.float32 else 2) - (block >= 256),
    )
    return out


@triton.jit
def _exact_linear(
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
    # Tiles of the same columns run one after the other, so that they share these weights in the cache.
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
    """Apply a weight [size, depth] to rows [N, depth]; [N, size]."""
    rows, depth = x.shape
    size = weight.shape[0]
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _exact_linear[(triton.cdiv(rows, ROWS) * triton.cdiv(size, COLUMNS),)](
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
