"""One query a row against its paged past: grouped-query attention for decoding, split over the keys when rows are few.

A program holds the query heads of one row that share a key head and walks over that head's pages with an online
softmax, so a key is read once for all of them. With `splits` > 1 the past of a row is cut into as many stretches, each
its own program, and a second kernel joins them: then a few long rows still fill the chip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.models.ops.paged import Placement
from burnish.models.ops.quantised import Pages, Quantised

BLOCK = 64  # keys a step of the loop
FULL = 132 * 4  # programs that fill a large GPU


@triton.jit
def _decode(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    owner_ptr,
    position_ptr,
    out_ptr,
    partial_ptr,
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
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    pages_ptr = table_ptr + tl.load(owner_ptr + row) * table_stride
    length = (tl.load(position_ptr + row) + 1).to(tl.int32)  # 0 for a row that is not there
    first = tl.maximum(0, length - window)
    stretch = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    start = first + split * stretch
    stop = tl.minimum(length, start + stretch)

    query = tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM_BLOCK)
    real = (query < SHARED)[:, None] & (dim < DIM)[None, :]
    where = ((row * KV_HEADS + head) * SHARED + query)[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + where, mask=real, other=0.0)

    best = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
    for begin in range(start, stop, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        seen = index < stop
        page = tl.load(pages_ptr + index // PAGE, mask=seen, other=0).to(tl.int64)
        slot = (page * KV_HEADS + head) * PAGE + index % PAGE
        at = slot[:, None] * DIM + dim[None, :]
        inside = seen[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys_ptr + at, mask=inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if QUANTISED:
            scores *= tl.load(key_scale_ptr + slot, mask=seen, other=0.0)[None, :]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(values_ptr + at, mask=inside, other=0.0).to(q.dtype)
        if QUANTISED:
            weight *= tl.load(value_scale_ptr + slot, mask=seen, other=0.0)[None, :]
        sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        best = top

    if SPLITS == 1:
        out = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        # [row, head, split, query, dim + 2]: the sums, then what is needed to join them.
        base = ((row * KV_HEADS + head) * SPLITS + split) * SHARED + query
        tl.store(partial_ptr + base[:, None] * (DIM + 2) + dim[None, :], sums, mask=real)
        tl.store(partial_ptr + base * (DIM + 2) + DIM, best, mask=query < SHARED)
        tl.store(partial_ptr + base * (DIM + 2) + DIM + 1, total, mask=query < SHARED)


@triton.jit
def _join(partial_ptr, out_ptr, SHARED: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    pair, query = tl.program_id(0), tl.program_id(1)  # row and key head, query head of it
    dim = tl.arange(0, DIM_BLOCK)
    best = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([DIM_BLOCK], tl.float32)
    for split in range(SPLITS):
        base = ((pair * SPLITS + split) * SHARED + query) * (DIM + 2)
        here = tl.load(partial_ptr + base + DIM + tl.zeros([1], tl.int32))
        top = tl.maximum(best, here)
        # A stretch without keys has -inf: exp2(-inf - -inf) would be NaN before the first real one.
        shrink = tl.where(best > -float("inf"), tl.exp2(best - top), 0.0)
        grow = tl.where(here > -float("inf"), tl.exp2(here - top), 0.0)
        total = total * shrink + tl.load(partial_ptr + base + DIM + 1 + tl.zeros([1], tl.int32)) * grow
        sums = sums * shrink + tl.load(partial_ptr + base + dim, mask=dim < DIM, other=0.0) * grow
        best = top
    out = sums / tl.where(total > 0, total, 1.0)
    at = (pair * SHARED + query) * DIM + dim
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)


def splits_for(rows: int, kv_heads: int) -> int:
    """How many stretches a row's past is cut into: enough programs for the chip. A short past leaves some of them empty."""
    return max(1, min(FULL // (rows * kv_heads), 32))


def decode_attention(
    q: Tensor, keys: Pages, values: Pages, place: Placement, window: int | None, splits: int | None = None
) -> Tensor:
    """[rows, heads, D]: each query against the pages of its row as one kernel, or two."""
    rows, heads, dim = q.shape
    kv_heads, page = keys.shape[1], keys.shape[2]
    shared, splits = heads // kv_heads, splits or splits_for(rows, kv_heads)
    (keys, key_scale), (values, value_scale) = (x if isinstance(x, Quantised) else (x, q) for x in (keys, values))
    out = torch.empty_like(q)
    partial = q.new_empty(rows * kv_heads * splits * shared * (dim + 2) if splits > 1 else 0, dtype=torch.float32)
    block = triton.next_power_of_2(dim)
    _decode[(rows, kv_heads, splits)](
        q,
        keys,
        values,
        key_scale,
        value_scale,
        place.table,
        place.owner,
        place.position,
        out,
        partial,
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
        SPLITS=splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        QUANTISED=key_scale is not q,
        num_warps=2,
        # Heads of 256 fill a processor's shared memory with a stage fewer.
        num_stages=(3 if q.dtype != torch.float32 else 2) - (block >= 256),
    )
    if splits > 1:
        _join[(rows * kv_heads, shared)](
            partial, out, SHARED=shared, DIM=dim, DIM_BLOCK=block, SPLITS=splits, num_warps=1
        )
    return out
