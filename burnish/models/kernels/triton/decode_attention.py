"""Decode attention in one kernel: rotates a row's heads, stores its key and value, and attends to its cached past.

A program has the query heads of one row that share a key head. It computes its queries and the row's new key from the
fused projection, starts an online softmax with the new key, and loops over the pages of the past. A key is read once for
all queries. The past of a long row is divided into splits, one program each, which a second kernel combines (flash
decoding). A split has at least `least` keys, so that short rows have one split and write their result directly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.models.kernels.fp8 import FP8_MAX, Fp8Rows
from burnish.models.kernels.paged_cache import HeadNorms, Pages, Placement, decode_buffers

LOG2_E = 1.4426950408889634
TILE_CONFIG = (32, 1, 4)
"""Keys per loop step, warps and stages of a program, in half types: the fastest of six on an H200."""
FLOAT32_TILE_CONFIG = (32, 2, 3)
"""`TILE_CONFIG` in float32."""


@triton.jit
def _rotated_heads(
    qkv_ptr, norm_ptr, base, column, inside, cos, sin, eps, shift, factor, dim, other,
    DIM: tl.constexpr, NORMED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Heads [n, D] that start at the columns [n, 1], normed if NORMED, and rotated; `other` is `dim` in the other half."""
    x = tl.load(qkv_ptr + base + column + dim, mask=inside, other=0.0)
    swapped = tl.load(qkv_ptr + base + column + other, mask=inside, other=0.0)
    dtype = x.dtype
    x, swapped = x.to(tl.float32), swapped.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        weight = tl.load(norm_ptr + dim, mask=dim < DIM, other=0.0).to(tl.float32) + shift
        x = (x * scale * weight).to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + other, mask=dim < DIM, other=0.0).to(tl.float32) + shift
        swapped = (swapped * scale * weight).to(dtype).to(tl.float32)
        if SCALED:
            x = (x * factor).to(dtype).to(tl.float32)
            swapped = (swapped * factor).to(dtype).to(tl.float32)
    return (x * cos + swapped * sin).to(dtype)


@triton.jit
def _softcapped(scores, softcap):
    """cap * tanh(scores / cap) of scores in units of log2(e), as is the cap."""
    return softcap - 2.0 * softcap / (1.0 + tl.exp(2.0 * scores / softcap))


@triton.jit
def _to_fp8(x, LARGEST: tl.constexpr):
    """Quantise a vector [1, D] to e4m3, with its scale [1, 1]."""
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)[:, None]
    scale = tl.where(largest > 0, largest * (1 / LARGEST), 1.0)
    return tl.div_rn(wide, scale).to(tl.float8e4nv), scale


@triton.jit
def _split_ranges(position, window, splits, least, BLOCK: tl.constexpr):
    """First visible key, keys per split and number of splits of a row whose new token is at `position`."""
    first = tl.maximum(0, position + 1 - window)
    split_keys = tl.maximum(least, tl.cdiv(tl.cdiv(position - first, splits), BLOCK) * BLOCK)
    return first, split_keys, tl.maximum(1, tl.cdiv(position - first, split_keys))


@triton.jit(do_not_specialize_on_alignment=["splits", "least"])
def _decode_attention(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    position_ptr,
    rotation_ptr,
    out_ptr,
    sums_ptr,
    joints_ptr,
    scale,
    eps,
    shift,
    query_scale,
    table_stride,
    window,
    splits,
    least,
    softcap,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTISED: tl.constexpr,
    ROTATED: tl.constexpr,
    STORES: tl.constexpr,
    LARGEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, split = tl.program_id(0) % KV_HEADS, tl.program_id(1)
    row = tl.program_id(0) // KV_HEADS
    pages_ptr = table_ptr + row.to(tl.int64) * table_stride
    position = tl.load(position_ptr + row).to(tl.int32)  # -1 for an empty row
    first, split_keys, active = _split_ranges(position, window, splits, least, BLOCK)
    known = tl.maximum(position, 0)
    dim = tl.arange(0, DIM_BLOCK)[None, :]
    other = tl.where(dim < DIM // 2, dim + DIM // 2, dim - DIM // 2)
    turn = known
    if ROTATED:
        turn = tl.maximum(tl.load(rotation_ptr + row).to(tl.int32), 0)
    cos = tl.load(cos_ptr + turn * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + turn * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    start = first + split * split_keys
    stop = tl.minimum(position, start + split_keys)
    key = tl.arange(0, BLOCK)
    page = tl.load(pages_ptr + tl.maximum(tl.minimum(start + key, stop - 1), 0) // PAGE)
    if split < active:
        query = tl.arange(0, QUERIES)[:, None]
        real = (query < SHARED) & (dim < DIM)
        base = row.to(tl.int64) * ((SHARED + 2) * KV_HEADS * DIM)
        q = _rotated_heads(
            qkv_ptr, q_norm_ptr, base, (head * SHARED + query) * DIM, real, cos, sin, eps, shift, query_scale, dim, other,
            DIM, NORMED, SCALED,
        )  # fmt: skip
        whole = dim < DIM
        column = (SHARED * KV_HEADS + head) * DIM + tl.zeros([1, 1], tl.int32)
        new_key = _rotated_heads(
            qkv_ptr, k_norm_ptr, base, column, whole, cos, sin, eps, shift, 1.0, dim, other, DIM, NORMED, False,
        )  # fmt: skip
        new_value = tl.load(qkv_ptr + base + column + KV_HEADS * DIM + dim, mask=whole, other=0.0)
        mine = (split == 0) & (position >= 0) & STORES
        new_page = tl.load(pages_ptr + known // PAGE).to(tl.int64)
        slot = (new_page * KV_HEADS + head) * PAGE + known % PAGE
        if QUANTISED:
            small_key, key_size = _to_fp8(new_key, LARGEST)
            small_value, value_size = _to_fp8(new_value, LARGEST)
            at_scale = slot + tl.zeros([1, 1], tl.int64)
            tl.store(key_scale_ptr + at_scale, key_size, mask=mine)
            tl.store(value_scale_ptr + at_scale, value_size, mask=mine)
            tl.store(keys_ptr + slot * DIM + dim, small_key, mask=whole & mine)
            tl.store(values_ptr + slot * DIM + dim, small_value, mask=whole & mine)
            wide_key = small_key.to(tl.float32) * key_size
            wide_value = small_value.to(tl.float32) * value_size
        else:
            tl.store(keys_ptr + slot * DIM + dim, new_key, mask=whole & mine)
            tl.store(values_ptr + slot * DIM + dim, new_value, mask=whole & mine)
            wide_key = new_key.to(tl.float32)
            wide_value = new_value.to(tl.float32)

        # The first split starts with the new key; the others have at least one key.
        new_score = tl.sum(q.to(tl.float32) * wide_key, 1) * scale
        if SOFTCAPPED:
            new_score = _softcapped(new_score, softcap)
        best = tl.where(split == 0, new_score, -float("inf"))
        total = tl.where(split == 0, 1.0, 0.0) + tl.zeros([QUERIES], tl.float32)
        sums = tl.where(split == 0, wide_value, 0.0) + tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
        for begin in range(start, stop, BLOCK):
            index = begin + key
            inside = tl.minimum(index, stop - 1)  # keys past the end read the last key and get weight 0
            at_key = (page.to(tl.int64) * KV_HEADS + head) * PAGE + inside % PAGE
            at = at_key[:, None] * DIM + dim
            page = tl.load(pages_ptr + tl.minimum(index + BLOCK, stop - 1) // PAGE)
            if DIM == DIM_BLOCK:
                k = tl.load(keys_ptr + at).to(q.dtype)
                v = tl.load(values_ptr + at).to(q.dtype)
            else:
                k = tl.load(keys_ptr + at, mask=dim < DIM, other=0.0).to(q.dtype)
                v = tl.load(values_ptr + at, mask=dim < DIM, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if QUANTISED:
                scores *= tl.load(key_scale_ptr + at_key)[None, :]
            if SOFTCAPPED:
                scores = _softcapped(scores, softcap)
            scores = tl.where((index < stop)[None, :], scores, -float("inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            weight = tl.exp2(scores - top[:, None])
            shrink = tl.exp2(best - top)
            total = total * shrink + tl.sum(weight, 1)
            if QUANTISED:
                weight *= tl.load(value_scale_ptr + at_key)[None, :]
            sums = tl.dot(weight.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
            best = top

        pair = row * KV_HEADS + head
        if active == 1:
            where = (pair.to(tl.int64) * SHARED + query) * DIM + dim
            tl.store(out_ptr + where, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=real)
        else:
            at_query = (pair * splits + split) * SHARED + tl.arange(0, QUERIES)
            tl.store(sums_ptr + at_query[:, None].to(tl.int64) * DIM + dim, sums, mask=real)
            tl.store(joints_ptr + at_query * 2, best, mask=tl.arange(0, QUERIES) < SHARED)
            tl.store(joints_ptr + at_query * 2 + 1, total, mask=tl.arange(0, QUERIES) < SHARED)


@triton.jit(do_not_specialize_on_alignment=["splits", "least"])
def _combine_splits(
    sums_ptr,
    joints_ptr,
    position_ptr,
    out_ptr,
    window,
    splits,
    least,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair, query = tl.program_id(0), tl.program_id(1)  # (row, key head), and a query head of this key head
    position = tl.load(position_ptr + pair // KV_HEADS).to(tl.int32)
    _, _, active = _split_ranges(position, window, splits, least, BLOCK)
    if active > 1:  # a row with one split has already written its result
        dim = tl.arange(0, DIM_BLOCK)
        best = tl.full([1], -float("inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        sums = tl.zeros([DIM_BLOCK], tl.float32)
        for split in range(active):
            at = (pair * splits + split) * SHARED + query
            here = tl.load(joints_ptr + at * 2 + tl.zeros([1], tl.int32))
            top = tl.maximum(best, here)
            shrink, grow = tl.exp2(best - top), tl.exp2(here - top)
            total = total * shrink + tl.load(joints_ptr + at * 2 + 1 + tl.zeros([1], tl.int32)) * grow
            found = tl.load(sums_ptr + at.to(tl.int64) * DIM + dim, mask=dim < DIM, other=0.0)
            sums = sums * shrink + found * grow
            best = top
        where = (pair.to(tl.int64) * SHARED + query) * DIM + dim
        tl.store(out_ptr + where, (sums / total).to(out_ptr.dtype.element_ty), mask=dim < DIM)


def decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    placement: Placement,
    norms: HeadNorms | None,
    keys: Pages,
    values: Pages,
    window: int | None,
    splits: int,
    least: int,
    softcap: float | None = None,
    stores: bool = True,
) -> Tensor:
    """`burnish.models.kernels.inference_ops.decode_attention` in one kernel, or two with several splits; [rows, heads * D].

    Without `stores` the new keys and values are in the cache already.
    """
    _, kv_heads, page, dim = keys.shape
    rows, columns = qkv.shape
    shared = columns // dim // kv_heads - 2
    q_norm, k_norm, eps, shift, query_scale = norms or HeadNorms(qkv, qkv, 0.0)
    (keys, key_scale), (values, value_scale) = (x if isinstance(x, Fp8Rows) else (x, cos) for x in (keys, values))
    out, sums, joints = decode_buffers(qkv, kv_heads, dim, splits)
    dim_block = max(16, triton.next_power_of_2(dim))
    reach = window if window is not None else 1 << 30
    block, warps, stages = TILE_CONFIG if qkv.dtype != torch.float32 else FLOAT32_TILE_CONFIG
    _decode_attention[(rows * kv_heads, splits)](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        keys,
        values,
        key_scale,
        value_scale,
        placement.table,
        placement.position,
        placement.turn,
        out,
        sums,
        joints,
        dim**-0.5 * LOG2_E,
        eps,
        shift,
        query_scale,
        placement.table.stride(0),
        reach,
        splits,
        least,
        0.0 if softcap is None else softcap * LOG2_E,
        KV_HEADS=kv_heads,
        SHARED=shared,
        QUERIES=max(16, triton.next_power_of_2(shared)),
        DIM=dim,
        DIM_BLOCK=dim_block,
        PAGE=page,
        BLOCK=block,
        SOFTCAPPED=softcap is not None,
        NORMED=norms is not None,
        SCALED=query_scale != 1.0,
        QUANTISED=key_scale is not cos,
        ROTATED=placement.rotation is not None,
        STORES=stores,
        LARGEST=FP8_MAX,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages - (dim_block >= 256),  # with heads of 256 another stage would not fit in shared memory
    )
    if splits > 1:
        combine_splits(sums, joints, placement.position, out, reach, splits, least, kv_heads, dim, block)
    return out


def combine_splits(
    sums: Tensor,
    joints: Tensor,
    position: Tensor,
    out: Tensor,
    reach: int,
    splits: int,
    least: int,
    kv_heads: int,
    dim: int,
    block: int,
) -> None:
    """Combine the partial results of rows with several splits into `out`; a split has a multiple of `block` keys."""
    shared = out.shape[1] // dim // kv_heads
    _combine_splits[(out.shape[0] * kv_heads, shared)](
        sums,
        joints,
        position,
        out,
        reach,
        splits,
        least,
        KV_HEADS=kv_heads,
        SHARED=shared,
        DIM=dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        BLOCK=block,
        num_warps=1,
    )
