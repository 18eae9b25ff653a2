"""Decoding's attention as one kernel: rotate a row's new token, write it to the cache, attend to it and to the row's past.

A program has the query heads of one row that share a key head. It rotates them and the new key, which it keeps in registers
beside the new value while both go to their page, and walks over the pages before with an online softmax: a key is read once
for all of its query heads. Where a row's past is long for the number of rows it is cut into stretches, each its own program;
the last one to finish joins them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from burnish.models.ops.kernels.early import early
from burnish.models.ops.paged import Norms, Placement
from burnish.models.ops.quantised import LARGEST, Pages, Quantised

FULL = 132 * 4  # programs that fill a large GPU
MOST = 32  # stretches of a row
LEAST = 256  # keys of a stretch: fewer are read sooner than they are joined


@triton.jit
def _turned(
    at, dim, inside, norm_ptr, cos, sin, eps, shift, factor, DIM: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr
):
    """Heads [n, DIM] from pointers `at` [n, 1], normed where the family does so, rotated."""
    other_half = tl.where(dim < DIM // 2, dim + DIM // 2, dim - DIM // 2)
    own = tl.load(at + dim, mask=inside, other=0.0)
    other = tl.load(at + other_half, mask=inside, other=0.0)
    dtype = own.dtype
    own, other = own.to(tl.float32), other.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        weight = tl.load(norm_ptr + dim, mask=dim < DIM, other=0.0).to(tl.float32) + shift
        own = (own * scale * weight).to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + other_half, mask=dim < DIM, other=0.0).to(tl.float32) + shift
        other = (other * scale * weight).to(dtype).to(tl.float32)
        if SCALED:
            own, other = (own * factor).to(dtype).to(tl.float32), (other * factor).to(dtype).to(tl.float32)
    return (own * cos + other * sin).to(dtype)


@triton.jit
def _put(x, pages_ptr, scale_ptr, slot, dim, DIM: tl.constexpr, QUANTISED: tl.constexpr, LARGEST: tl.constexpr):
    """Write a vector [1, DIM] to its slot; returns what a reader of the slot would find, in float32."""
    wide = x.to(tl.float32)
    if QUANTISED:
        largest = tl.max(tl.abs(wide), 1)
        scale = tl.where(largest > 0, largest * (1 / LARGEST), 1.0)
        eight = tl.div_rn(wide, scale[:, None]).to(tl.float8e4nv)
        tl.store(pages_ptr + slot * DIM + dim, eight, mask=dim < DIM)
        tl.store(scale_ptr + slot + tl.arange(0, 1), scale)
        wide = eight.to(tl.float32) * scale[:, None]
    else:
        tl.store(pages_ptr + slot * DIM + dim, x, mask=dim < DIM)
    return wide


@triton.jit
def _join(
    sums_ptr,
    stats_ptr,
    out_ptr,
    pair,
    parts,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """What the stretches of a row and key head have found, as one."""
    part = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_BLOCK)
    there = part < parts
    for query in tl.static_range(SHARED):
        line = (pair * SPLITS + part) * SHARED + query
        best = tl.load(stats_ptr + 2 * line, mask=there, other=-float("inf"), cache_modifier=".cg")
        total = tl.load(stats_ptr + 2 * line + 1, mask=there, other=0.0, cache_modifier=".cg")
        inside = there[:, None] & (dim < DIM)[None, :]
        sums = tl.load(sums_ptr + line[:, None] * DIM + dim[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(best - tl.max(best, 0))
        out = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
        tl.store(out_ptr + (pair * SHARED + query) * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _attend(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    position_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    arrived_ptr,
    scale,
    eps,
    shift,
    query_scale,
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
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
    QK_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTISED: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = row * KV_HEADS + head
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(position_ptr + row).to(tl.int32)  # -1 for a row that is not there
    first = tl.maximum(0, position + 1 - window)
    past = tl.maximum(position - first, 0)
    stretch = tl.maximum(tl.cdiv(tl.cdiv(past, SPLITS), BLOCK) * BLOCK, LEAST)
    parts = tl.maximum(tl.cdiv(past, stretch), 1)
    if split < parts:
        query = tl.arange(0, QUERIES)
        dim = tl.arange(0, DIM_BLOCK)
        real = (query < SHARED)[:, None] & (dim < DIM)[None, :]
        new_ptr = qkv_ptr + row.to(tl.int64) * (SHARED + 2) * KV_HEADS * DIM
        turn = tl.maximum(position, 0) * DIM + dim[None, :]
        cos = tl.load(cos_ptr + turn, mask=(dim < DIM)[None, :], other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + turn, mask=(dim < DIM)[None, :], other=0.0).to(tl.float32)
        q = _turned(
            new_ptr + (head * SHARED + query)[:, None] * DIM, dim[None, :], real, q_norm_ptr, cos, sin, eps, shift, query_scale,
            DIM, QK_NORM, SCALED,
        )  # fmt: skip
        best = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
        pages_ptr = table_ptr + row * table_stride
        if (split == 0) & (position >= 0):
            key_at = new_ptr + (SHARED * KV_HEADS + head) * DIM + tl.zeros([1, 1], tl.int32)
            known = (dim < DIM)[None, :]
            k = _turned(key_at, dim[None, :], known, k_norm_ptr, cos, sin, eps, shift, 1.0, DIM, QK_NORM, False)
            v = tl.load(key_at + KV_HEADS * DIM + dim[None, :], mask=known, other=0.0)
            slot = (tl.load(pages_ptr + position // PAGE).to(tl.int64) * KV_HEADS + head) * PAGE + position % PAGE
            key = _put(k, keys_ptr, key_scale_ptr, slot, dim[None, :], DIM, QUANTISED, LARGEST)
            value = _put(v, values_ptr, value_scale_ptr, slot, dim[None, :], DIM, QUANTISED, LARGEST)
            best = tl.sum(q.to(tl.float32) * key, 1) * scale
            total += 1.0
            sums += value

        start = first + split * stretch
        stop = tl.minimum(position, start + stretch)
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

        if (SPLITS == 1) or (parts == 1):
            out = sums / tl.where(total > 0, total, 1.0)[:, None]
            to = (pair * SHARED + query)[:, None] * DIM + dim[None, :]
            tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=real)
        else:
            line = (pair * SPLITS + split) * SHARED + query
            tl.store(sums_ptr + line[:, None] * DIM + dim[None, :], sums, mask=real)
            tl.store(stats_ptr + 2 * line, best, mask=query < SHARED)
            tl.store(stats_ptr + 2 * line + 1, total, mask=query < SHARED)
            tl.debug_barrier()  # all of it is written before the count says so
            if tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived_ptr + pair, 0)
                _join(sums_ptr, stats_ptr, out_ptr, pair, parts, SHARED, DIM, DIM_BLOCK, SPLITS)


def splits_for(rows: int, kv_heads: int) -> int:
    """The most stretches a row's past is cut into: enough programs for the chip."""
    return max(1, min(triton.next_power_of_2(FULL // (rows * kv_heads) + 1) // 2, MOST))


@cache
def _arrived(device: torch.device, size: int) -> Tensor:
    """How many stretches of each row and key head are done; 0 again after each kernel, so kernels in a row share it."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def tiles(q_dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """Keys a step of the loop, and how the compiler cuts it up."""
    wide = q_dtype == torch.float32
    # Heads of 256 fill a processor's shared memory with a stage fewer.
    return {"BLOCK": 64, "num_warps": 2, "num_stages": (2 if wide else 3) - (dim > 128)}


def row_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: Placement,
    norms: Norms | None,
    keys: Pages,
    values: Pages,
    window: int | None,
    splits: int | None = None,
    least: int = LEAST,
    options: dict[str, Any] | None = None,
) -> Tensor:
    """`burnish.models.ops.paged.decode_attention` as one kernel; see there."""
    rows = qkv.shape[0]
    _, kv_heads, page, dim = keys.shape
    shared = qkv.shape[1] // (dim * kv_heads) - 2
    splits = splits or splits_for(rows, kv_heads)
    out = qkv.new_empty(rows, kv_heads * shared * dim)
    lines = rows * kv_heads * splits * shared if splits > 1 else 0
    sums, stats = (qkv.new_empty(lines * n, dtype=torch.float32) for n in (dim, 2))
    arrived = _arrived(qkv.device, max(1024, triton.next_power_of_2(rows * kv_heads)))
    q_norm, k_norm, eps, shift, query_scale = norms or Norms(qkv, qkv, 0.0)
    (keys, key_scale), (values, value_scale) = (x if isinstance(x, Quantised) else (x, qkv) for x in (keys, values))
    _attend[(rows, kv_heads, splits)](
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        keys,
        values,
        key_scale,
        value_scale,
        place.table,
        place.position,
        out,
        sums,
        stats,
        arrived,
        dim**-0.5 * 1.4426950408889634,
        eps,
        shift,
        query_scale,
        place.table.stride(0),
        window if window is not None else 1 << 30,
        KV_HEADS=kv_heads,
        SHARED=shared,
        QUERIES=max(16, triton.next_power_of_2(shared)),
        DIM=dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        PAGE=page,
        SPLITS=splits,
        LEAST=least,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        QK_NORM=norms is not None,
        SCALED=query_scale != 1.0,
        QUANTISED=key_scale is not qkv,
        LARGEST=LARGEST,
        **early(qkv),
        **(options or tiles(qkv.dtype, dim)),
    )
    return out
