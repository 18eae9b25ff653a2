"""Decode attention over a cache of latents, and the kernel that writes to it (`kernels/latent_ops.py`).

A program has some of the query heads of one row. All heads read the same key, the latent with the rotated key behind it, and the latent
is the value too: it is loaded once for both products. The programs of one row run at the same time and share its pages in the L2 cache.
The past of a long row is divided into splits, which a second kernel combines (flash decoding). Where several ranks have parts of the
cache, `joints` has the logarithm of each softmax total, by which their results are combined. FlashMLA (DeepSeek) has the same
arithmetic in CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.models.kernels.fp8 import FP8_MAX, Fp8Rows
from burnish.models.kernels.paged_cache import Pages, Placement
from burnish.models.kernels.triton.decode_attention import LOG2_E, _split_ranges, _to_fp8
from burnish.models.latent_shape import HEADS_PER_PROGRAM

if TYPE_CHECKING:
    from burnish.models.kernels.latent_ops import LatentHeads

TILE_CONFIG = (32, 4, 2)
"""Keys per loop step, warps and stages of a program, in half types. Chosen to fit the shared memory of an A100; not measured."""
FLOAT32_TILE_CONFIG = (16, 4, 1)
"""`TILE_CONFIG` in float32."""
NO_WINDOW = 1 << 30


@triton.jit
def _store_latents(
    q_ptr,
    latent_ptr,
    rope_ptr,
    cos_ptr,
    sin_ptr,
    owner_ptr,
    position_ptr,
    table_ptr,
    q_out_ptr,
    k_out_ptr,
    latents_ptr,
    keys_ptr,
    latent_scale_ptr,
    key_scale_ptr,
    latent_stride,
    rope_stride,
    table_stride,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    GAP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTISED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Rotate the queries and the key of a token, and write its latent and key. A pair is STEP * i and STEP * i + GAP in the weights."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row).to(tl.int32)  # -1 for an empty row
    known = tl.maximum(position, 0)
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    is_pair = pair < HALF
    turn = known * DIM + NOPE // 2 + pair
    cos = tl.load(cos_ptr + turn, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + turn + DIM // 2, mask=is_pair, other=0.0).to(tl.float32)

    head = tl.arange(0, HEADS_BLOCK)[:, None]
    inside = (head < HEADS) & is_pair
    at = (row * HEADS + head) * DIM + NOPE + pair * STEP
    first = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(q_ptr + at + GAP, mask=inside, other=0.0).to(tl.float32)
    to = q_out_ptr + (row * HEADS + head) * 2 * HALF + pair
    kind = q_out_ptr.dtype.element_ty
    tl.store(to, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(to + HALF, (second * cos + first * sin).to(kind), mask=inside)

    first = tl.load(rope_ptr + row * rope_stride + pair * STEP, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(rope_ptr + row * rope_stride + pair * STEP + GAP, mask=is_pair, other=0.0).to(tl.float32)
    low = (first * cos - second * sin).to(kind)
    high = (second * cos + first * sin).to(kind)
    tl.store(k_out_ptr + row * 2 * HALF + pair, low, mask=is_pair)
    tl.store(k_out_ptr + row * 2 * HALF + HALF + pair, high, mask=is_pair)

    column = tl.arange(0, RANK_BLOCK)[None, :]
    latent = tl.load(latent_ptr + row * latent_stride + column, mask=column < RANK, other=0.0)
    page = tl.load(table_ptr + tl.load(owner_ptr + row) * table_stride + known // PAGE).to(tl.int64)
    slot = tl.where(position >= 0, page, 0) * PAGE + known % PAGE
    if QUANTISED:
        largest = tl.maximum(tl.max(tl.abs(low.to(tl.float32)), 1), tl.max(tl.abs(high.to(tl.float32)), 1))[:, None]
        size = tl.where(largest > 0, largest * (1 / LARGEST), 1.0)
        low = tl.div_rn(low.to(tl.float32), size).to(tl.float8e4nv)
        high = tl.div_rn(high.to(tl.float32), size).to(tl.float8e4nv)
        latent, latent_size = _to_fp8(latent, LARGEST)
        at_scale = slot + tl.zeros([1, 1], tl.int64)
        tl.store(key_scale_ptr + at_scale, size)
        tl.store(latent_scale_ptr + at_scale, latent_size)
    tl.store(keys_ptr + slot * 2 * HALF + pair, low, mask=is_pair)
    tl.store(keys_ptr + slot * 2 * HALF + HALF + pair, high, mask=is_pair)
    tl.store(latents_ptr + slot * RANK + column, latent, mask=column < RANK)


def store_latents(
    heads: LatentHeads, cos: Tensor, sin: Tensor, placement: Placement, latents: Pages, keys: Pages
) -> tuple[Tensor, Tensor]:
    """`burnish.models.kernels.latent_ops.store_latents` as one kernel with one program per token."""
    shape, page = heads.shape, latents.shape[2]
    q = heads.q.contiguous()
    rows, num_heads, dim = q.shape
    q_rope, k_rope = q.new_empty(rows, num_heads, shape.rope_dim), q.new_empty(rows, shape.rope_dim)
    (latents, latent_scale), (keys, key_scale) = (x if isinstance(x, Fp8Rows) else (x, cos) for x in (latents, keys))
    half, heads_block = shape.rope_dim // 2, triton.next_power_of_2(num_heads)
    half_block = triton.next_power_of_2(half)
    _store_latents[(rows,)](
        q,
        heads.latent,
        heads.k_rope,
        cos,
        sin,
        placement.owner,
        placement.position,
        placement.table,
        q_rope,
        k_rope,
        latents,
        keys,
        latent_scale,
        key_scale,
        heads.latent.stride(0),
        heads.k_rope.stride(0),
        placement.table.stride(0),
        HEADS=num_heads,
        HEADS_BLOCK=heads_block,
        DIM=dim,
        NOPE=shape.nope_dim,
        HALF=half,
        HALF_BLOCK=half_block,
        STEP=2 if shape.interleaved else 1,
        GAP=1 if shape.interleaved else half,
        RANK=shape.rank,
        RANK_BLOCK=triton.next_power_of_2(shape.rank),
        PAGE=page,
        QUANTISED=latent_scale is not cos,
        LARGEST=FP8_MAX,
        num_warps=max(1, min(8, heads_block * half_block // 512)),
    )
    return q_rope, k_rope


@triton.jit(do_not_specialize_on_alignment=["splits", "least"])
def _attend_latents(
    q_ptr,
    q_rope_ptr,
    latents_ptr,
    keys_ptr,
    latent_scale_ptr,
    key_scale_ptr,
    table_ptr,
    position_ptr,
    out_ptr,
    joint_ptr,
    sums_ptr,
    joints_ptr,
    scale,
    q_row_stride,
    q_head_stride,
    table_stride,
    window,
    splits,
    least,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, split = tl.program_id(1), tl.program_id(2)
    pages_ptr = table_ptr + row.to(tl.int64) * table_stride
    position = tl.load(position_ptr + row).to(tl.int32)  # -1 for an empty row, which has no keys
    # The key of the new token is in the cache already: there is one key more than for a kernel that starts with it.
    first, split_keys, active = _split_ranges(position + 1, window, splits, least, BLOCK)
    start = first + split * split_keys
    stop = tl.minimum(position + 1, start + split_keys)
    if split < active:
        head = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
        column, turned = tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
        is_head = (head < HEADS)[:, None]
        at = row.to(tl.int64) * q_row_stride + head[:, None] * q_head_stride
        q = tl.load(q_ptr + at + column, mask=is_head & (column < RANK), other=0.0)
        at = (row.to(tl.int64) * HEADS + head[:, None]) * ROPE
        q_rope = tl.load(q_rope_ptr + at + turned, mask=is_head & (turned < ROPE), other=0.0)
        best = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, RANK_BLOCK], tl.float32)
        key = tl.arange(0, BLOCK)
        for begin in range(start, stop, BLOCK):
            index = begin + key
            inside = tl.minimum(index, stop - 1)  # keys past the end read the last key and get weight 0
            page = tl.load(pages_ptr + inside // PAGE).to(tl.int64)
            slot = page * PAGE + inside % PAGE
            c = tl.load(latents_ptr + slot[:, None] * RANK + column, mask=column < RANK, other=0.0).to(q.dtype)
            k = tl.load(keys_ptr + slot[:, None] * ROPE + turned, mask=turned < ROPE, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(c), input_precision=PRECISION)
            if QUANTISED:
                size = tl.load(latent_scale_ptr + slot)[None, :]
                scores *= size
                scores += (
                    tl.dot(q_rope, tl.trans(k), input_precision=PRECISION) * tl.load(key_scale_ptr + slot)[None, :]
                )
            else:
                scores = tl.dot(q_rope, tl.trans(k), scores, input_precision=PRECISION)
            scores = tl.where((index < stop)[None, :], scores * scale, -float("inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            weight = tl.exp2(scores - top[:, None])
            shrink = tl.exp2(best - top)
            total = total * shrink + tl.sum(weight, 1)
            if QUANTISED:
                weight *= size
            sums = tl.dot(weight.to(c.dtype), c, sums * shrink[:, None], input_precision=PRECISION)
            best = top

        real = is_head & (column < RANK)
        if active == 1:
            where = (row.to(tl.int64) * HEADS + head[:, None]) * RANK + column
            # An empty row has total 0. It gets zeros, and minus infinity as the logarithm.
            divisor = tl.where(total > 0, total, 1.0)
            mixed = sums / divisor[:, None]
            tl.store(out_ptr + where, mixed.to(out_ptr.dtype.element_ty), mask=real)
            tl.store(joint_ptr + row * HEADS + head, best + tl.log2(divisor), mask=head < HEADS)
        else:
            at_query = (row * splits + split) * HEADS + head
            tl.store(sums_ptr + at_query[:, None].to(tl.int64) * RANK + column, sums, mask=real)
            tl.store(joints_ptr + at_query * 2, best, mask=head < HEADS)
            tl.store(joints_ptr + at_query * 2 + 1, total, mask=head < HEADS)


@triton.jit(do_not_specialize_on_alignment=["splits", "least"])
def _combine_latents(
    sums_ptr,
    joints_ptr,
    position_ptr,
    out_ptr,
    joint_ptr,
    window,
    splits,
    least,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr + row).to(tl.int32)
    _, _, active = _split_ranges(position + 1, window, splits, least, BLOCK)
    if active > 1:  # a row with one split has already written its result
        column = tl.arange(0, RANK_BLOCK)
        best = tl.full([1], -float("inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        sums = tl.zeros([RANK_BLOCK], tl.float32)
        for split in range(active):
            at = (row * splits + split) * HEADS + head
            here = tl.load(joints_ptr + at * 2 + tl.zeros([1], tl.int32))
            top = tl.maximum(best, here)
            shrink, grow = tl.exp2(best - top), tl.exp2(here - top)
            total = total * shrink + tl.load(joints_ptr + at * 2 + 1 + tl.zeros([1], tl.int32)) * grow
            found = tl.load(sums_ptr + at.to(tl.int64) * RANK + column, mask=column < RANK, other=0.0)
            sums = sums * shrink + found * grow
            best = top
        at = row * HEADS + head
        where = at.to(tl.int64) * RANK + column
        tl.store(out_ptr + where, (sums / total).to(out_ptr.dtype.element_ty), mask=column < RANK)
        tl.store(joint_ptr + at + tl.zeros([1], tl.int32), best + tl.log2(total))


def attend_latents(
    q: Tensor,
    q_rope: Tensor,
    latents: Pages,
    keys: Pages,
    placement: Placement,
    head_dim: int,
    splits: int,
    least: int,
) -> tuple[Tensor, Tensor]:
    """`burnish.models.kernels.latent_ops.attend_latents` in one kernel, or two with several splits."""
    rows, num_heads, rank = q.shape
    page, rope = latents.shape[2], q_rope.shape[2]
    (latents, latent_scale), (keys, key_scale) = (x if isinstance(x, Fp8Rows) else (x, q) for x in (latents, keys))
    count = rows * num_heads * splits if splits > 1 else 0
    out = torch.empty(rows, num_heads, rank, dtype=q.dtype, device=q.device)
    joint = torch.empty(rows, num_heads, dtype=torch.float32, device=q.device)
    rank_block = max(16, triton.next_power_of_2(rank))
    sums, joints = (torch.empty(count, n, dtype=torch.float32, device=q.device) for n in (rank, 2))
    block, warps, stages = TILE_CONFIG if q.dtype != torch.float32 else FLOAT32_TILE_CONFIG
    _attend_latents[(triton.cdiv(num_heads, HEADS_PER_PROGRAM), rows, splits)](
        q,
        q_rope,
        latents,
        keys,
        latent_scale,
        key_scale,
        placement.table,
        placement.position,
        out,
        joint,
        sums,
        joints,
        head_dim**-0.5 * LOG2_E,
        q.stride(0),
        q.stride(1),
        placement.table.stride(0),
        NO_WINDOW,
        splits,
        least,
        HEADS=num_heads,
        QUERIES=HEADS_PER_PROGRAM,
        RANK=rank,
        RANK_BLOCK=rank_block,
        ROPE=rope,
        ROPE_BLOCK=max(16, triton.next_power_of_2(rope)),
        PAGE=page,
        BLOCK=block,
        QUANTISED=latent_scale is not q,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _combine_latents[(rows, num_heads)](
            sums,
            joints,
            placement.position,
            out,
            joint,
            NO_WINDOW,
            splits,
            least,
            HEADS=num_heads,
            RANK=rank,
            RANK_BLOCK=rank_block,
            BLOCK=block,
            num_warps=1,
        )
    return out, joint
