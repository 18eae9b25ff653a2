"""Fused element-wise kernels, one pass over the rows each: residual + norm, rotation + cache write, SwiGLU, NF4 dequantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.models.kernels.fp8 import FP8_MAX, Fp8Rows
from burnish.models.kernels.paged_cache import HeadNorms, Pages, Placement

if TYPE_CHECKING:
    from burnish.models.nf4 import Nf4

BYTES = 1024
"""Bytes of NF4 codes per program."""


@triton.jit
def _add_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    size,
    eps,
    shift,
    part_stride,
    PARTS: tl.constexpr,
    QUANTISED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + shift
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0)
    if PARTS > 0:
        delta = tl.load(delta_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            delta += tl.load(delta_ptr + part * part_stride + row * size + column, mask=inside, other=0.0).to(
                tl.float32
            )
        x = (x.to(tl.float32) + delta).to(x.dtype)
        tl.store(x_ptr + row * size + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale * weight).to(x.dtype)
    if QUANTISED:
        normed = normed.to(tl.float32)
        largest = tl.max(tl.abs(normed), 0)
        step = tl.where(largest > 0, largest * (1 / LARGEST), 1.0)
        tl.store(scale_ptr + row, step)
        tl.store(out_ptr + row * size + column, tl.div_rn(normed, step).to(tl.float8e4nv), mask=inside)
    else:
        tl.store(out_ptr + row * size + column, normed, mask=inside)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float, out: Tensor, scale: Tensor | None = None
) -> None:
    """Add `delta`, or the sum of its parts, to x in place, then write the RMS norm of x to `out`, in 8 bits if it has a `scale`."""
    rows, size = x.shape
    parts = 0 if delta is None else 1 if delta.dim() == 2 else delta.shape[0]
    block = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        out if scale is None else scale,
        size,
        eps,
        shift,
        rows * size,
        PARTS=parts,
        QUANTISED=scale is not None,
        LARGEST=FP8_MAX,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )


@triton.jit
def _halves_to_fp8(low, high, LARGEST: tl.constexpr):
    """Quantise both halves of vectors [heads, half] to e4m3, with the vectors' scales [heads, 1]."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))[:, None]
    scale = tl.where(largest > 0, largest * (1 / LARGEST), 1.0)
    return tl.div_rn(low, scale).to(tl.float8e4nv), tl.div_rn(high, scale).to(tl.float8e4nv), scale


@triton.jit
def _rotate_store(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    owner_ptr,
    position_ptr,
    rotation_ptr,
    table_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    eps,
    shift,
    query_scale,
    table_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    QK_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTISED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ROTATED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    DIM: tl.constexpr = 2 * HALF
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < Q_HEADS + 2 * KV_HEADS) & (column < HALF)
    at = qkv_ptr + (row * (Q_HEADS + 2 * KV_HEADS) + head) * DIM + column
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    dtype = first.dtype
    low, high = first.to(tl.float32), second.to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        for_q = inside & (head < Q_HEADS)
        for_k = inside & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
        # The remaining heads are values, whose norm and rotation are not used.
        weight = tl.load(q_norm_ptr + column + tl.zeros_like(head), mask=for_q, other=0.0).to(tl.float32)
        weight += tl.load(k_norm_ptr + column + tl.zeros_like(head), mask=for_k, other=0.0).to(tl.float32)
        low = (low * scale * (weight + shift)).to(dtype).to(tl.float32)
        weight = tl.load(q_norm_ptr + HALF + column + tl.zeros_like(head), mask=for_q, other=0.0).to(tl.float32)
        weight += tl.load(k_norm_ptr + HALF + column + tl.zeros_like(head), mask=for_k, other=0.0).to(tl.float32)
        high = (high * scale * (weight + shift)).to(dtype).to(tl.float32)
        if SCALED:
            factor = tl.where(head < Q_HEADS, query_scale, 1.0)
            low = (low * factor).to(dtype).to(tl.float32)
            high = (high * factor).to(dtype).to(tl.float32)
    position = tl.load(position_ptr + row)
    known = tl.maximum(position, 0)
    turned = known
    if ROTATED:
        turned = tl.maximum(tl.load(rotation_ptr + row), 0)
    turn = turned * DIM + HALF + column  # the second half of the table: +sin
    cos = tl.load(cos_ptr + turn, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + turn, mask=column < HALF, other=0.0).to(tl.float32)
    turned_low = (low * cos - high * sin).to(dtype)
    turned_high = (high * cos + low * sin).to(dtype)

    to = q_ptr + (row * Q_HEADS + head) * DIM + column
    tl.store(to, turned_low, mask=inside & (head < Q_HEADS))
    tl.store(to + HALF, turned_high, mask=inside & (head < Q_HEADS))
    page = tl.load(table_ptr + tl.load(owner_ptr + row) * table_stride + known // PAGE).to(tl.int64)
    page = tl.where(position >= 0, page, 0)
    slot = page * KV_HEADS * PAGE + known % PAGE
    is_key = inside & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_value = inside & (head >= Q_HEADS + KV_HEADS)
    if IN_PLACE:
        tl.store(at, turned_low, mask=is_key)
        tl.store(at + HALF, turned_high, mask=is_key)
    if QUANTISED:
        turned_low, turned_high, scale = _halves_to_fp8(turned_low, turned_high, LARGEST)
        to = key_scale_ptr + slot + (head - Q_HEADS) * PAGE
        tl.store(to, scale, mask=(head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS))
        first, second, scale = _halves_to_fp8(first, second, LARGEST)
        to = value_scale_ptr + slot + (head - Q_HEADS - KV_HEADS) * PAGE
        tl.store(to, scale, mask=(head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS))
    to = keys_ptr + (slot + (head - Q_HEADS) * PAGE) * DIM + column
    tl.store(to, turned_low, mask=is_key)
    tl.store(to + HALF, turned_high, mask=is_key)
    to = values_ptr + (slot + (head - Q_HEADS - KV_HEADS) * PAGE) * DIM + column
    tl.store(to, first, mask=is_value)
    tl.store(to + HALF, second, mask=is_value)


def rotate_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    placement: Placement,
    norms: HeadNorms | None,
    keys: Pages,
    values: Pages,
    in_place: bool = False,
) -> Tensor:
    """`burnish.models.kernels.inference_ops.rotate_store` as one kernel with one program per token."""
    rows = qkv.shape[0]
    _, kv_heads, page, dim = keys.shape
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(rows, q_heads, dim)
    q_norm, k_norm, eps, shift, query_scale = norms or HeadNorms(qkv, qkv, 0.0)
    (keys, key_scale), (values, value_scale) = (x if isinstance(x, Fp8Rows) else (x, q) for x in (keys, values))
    heads_block = triton.next_power_of_2(q_heads + 2 * kv_heads)
    half_block = triton.next_power_of_2(dim // 2)
    _rotate_store[(rows,)](
        qkv,
        cos,
        sin,
        placement.owner,
        placement.position,
        placement.turn,
        placement.table,
        q_norm,
        k_norm,
        q,
        keys,
        values,
        key_scale,
        value_scale,
        eps,
        shift,
        query_scale,
        placement.table.stride(0),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        HEADS_BLOCK=heads_block,
        HALF_BLOCK=half_block,
        PAGE=page,
        QK_NORM=norms is not None,
        SCALED=query_scale != 1.0,
        QUANTISED=key_scale is not q,
        IN_PLACE=in_place,
        ROTATED=placement.rotation is not None,
        LARGEST=FP8_MAX,
        num_warps=max(1, min(8, heads_block * half_block // 256)),
    )
    return q


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * size + column, active * up, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of each row."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _swiglu[(rows, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _swiglu_backward(grad_ptr, gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = row * 2 * size + column
    grad = tl.load(grad_ptr + row * size + column, mask=inside, other=0.0)
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + size, mask=inside, other=0.0).to(tl.float32)
    wide = grad.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + at, (wide * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(grad.dtype), mask=inside)
    tl.store(out_ptr + at + size, (wide * gate * sigmoid).to(grad.dtype), mask=inside)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `swiglu` with respect to its input."""
    rows, size = grad.shape
    out = torch.empty_like(gate_up)
    _swiglu_backward[(rows, triton.cdiv(size, 1024))](grad.contiguous(), gate_up, out, size, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _dequantise_nf4(
    codes_ptr,
    scales_ptr,
    ranges_ptr,
    values_ptr,
    out_ptr,
    num_bytes,
    num,
    DOUBLE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BYTES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BYTES
    at = first + tl.arange(0, BYTES)
    inside = at < num_bytes
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    block = at // HALF
    scale = tl.load(scales_ptr + block, mask=inside, other=0).to(tl.float32)
    if DOUBLE:
        low = tl.load(ranges_ptr + 2 * (block // GROUP), mask=inside, other=0.0)
        scale = low + tl.load(ranges_ptr + 2 * (block // GROUP) + 1, mask=inside, other=0.0) * scale
    upper = (tl.load(values_ptr + (code >> 4)) * scale).to(out_ptr.dtype.element_ty)
    lower = (tl.load(values_ptr + (code & 15)) * scale).to(out_ptr.dtype.element_ty)
    to = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + to, tl.interleave(upper, lower), mask=to < num)


def dequantise_nf4(matrix: Nf4, values: Tensor, dtype: torch.dtype, block: int, group: int) -> Tensor:
    """The matrix [outputs, inputs] as `dtype`."""
    out = torch.empty(matrix.shape, dtype=dtype, device=matrix.codes.device)
    _dequantise_nf4[(triton.cdiv(matrix.codes.numel(), BYTES),)](
        matrix.codes,
        matrix.scales,
        values if matrix.ranges is None else matrix.ranges,
        values,
        out,
        matrix.codes.numel(),
        out.numel(),
        DOUBLE=matrix.ranges is not None,
        GROUP=group,
        HALF=block // 2,
        BYTES=BYTES,
        num_warps=4,
    )
    return out
