"""One query a row against its paged past, every row computed alike, whatever rows stand beside it.

A program holds the query heads of one token that share a key head and walks over that head's pages with an online softmax,
in blocks of one size from the first key to the last: no choice by the number of rows, no stretches. A token's result then
depends on the token and its past alone, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.models.ops.paged import Placement

BLOCK = 64  # keys a step of the loop


@triton.jit
def _exact_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    owner_ptr,
    position_ptr,
    out_ptr,
    scale,
    table_stride,
    window,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    pages_ptr = table_ptr + tl.load(owner_ptr + row) * table_stride
    length = (tl.load(position_ptr + row) + 1).to(tl.int32)  # 0 for a row that is not there
    first = tl.maximum(0, length - window)

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


def exact_attention(q: Tensor, keys: Tensor, values: Tensor, place: Placement, window: int | None) -> Tensor:
    """[N, heads, D]: each query against the pages of its row up to its own position."""
    rows, heads, dim = q.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    shared = heads // kv_heads
    out = torch.empty_like(q)
    block = triton.next_power_of_2(dim)
    _exact_attention[(rows, kv_heads)](
        q,
        keys,
        values,
        place.table,
        place.owner,
        place.position,
        out,
        dim**-0.5 * 1.4426950408889634,
        place.table.stride(0),
        window if window is not None else 1 << 30,
        KV_HEADS=kv_heads,
        SHARED=shared,
        QUERIES=max(16, triton.next_power_of_2(shared)),
        DIM=dim,
        DIM_BLOCK=max(16, block),
        PAGE=page,
        BLOCK=BLOCK,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=2,
        # Heads of 256 fill a processor's shared memory with a stage fewer.
        num_stages=(3 if q.dtype != torch.float32 else 2) - (block >= 256),
    )
    return out
