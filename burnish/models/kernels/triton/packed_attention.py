"""Causal attention of packed sequences with soft-capped scores, forward and backward (flash attention 2, 2307.08691).

    s = cap * tanh(q k^T / (cap sqrt(D))),   ds / d(q k^T / sqrt(D)) = 1 - (s / cap)^2

torch's variable-length flash attention has no soft cap. The queries of a sequence are its last rows, so that shared prefixes and chunks
need no special case: the query at index i has position i + (keys - queries). A forward program has a block of queries of one head, and
loops over the keys that its window leaves. The backward has two kernels: one with a block of queries for their gradient, one with a block
of keys for the gradients of keys and values, which sums over the query heads that share the key head. No sum is atomic, so equal inputs
give equal bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_WINDOW = 1 << 30


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _bounds(queries_ptr, keys_ptr, sequence):
    """First query row, number of queries, first key row and number of keys of a sequence."""
    q_first = tl.load(queries_ptr + sequence)
    k_first = tl.load(keys_ptr + sequence)
    return q_first, tl.load(queries_ptr + sequence + 1) - q_first, k_first, tl.load(keys_ptr + sequence + 1) - k_first


@triton.jit
def _rows(ptr, first, index, stride, head, dim, count, DIM: tl.constexpr):
    """Rows [n, D] of one head; rows past the end repeat the last."""
    row = (first + tl.minimum(index, count - 1)).to(tl.int64)
    return tl.load(ptr + row[:, None] * stride + head * DIM + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)


@triton.jit
def _key_span(begin, q_count, k_count, window, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """First and last block of keys that queries from `begin` on attend to: the first is a multiple of KEYS."""
    first = tl.maximum(0, begin + k_count - q_count + 1 - window) // KEYS * KEYS
    return first, tl.minimum(begin + QUERIES, q_count) + k_count - q_count


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_bounds_ptr, k_bounds_ptr,
    q_stride, k_stride, v_stride, scale, softcap, window,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    q_first, q_count, k_first, k_count = _bounds(q_bounds_ptr, k_bounds_ptr, sequence)
    begin = tl.program_id(0) * QUERIES
    if begin < q_count:
        query = begin + tl.arange(0, QUERIES)
        dim = tl.arange(0, DIM_BLOCK)
        position = tl.minimum(query, q_count - 1) + k_count - q_count
        q = _rows(q_ptr, q_first, query, q_stride, head, dim, q_count, DIM)
        first, stop = _key_span(begin, q_count, k_count, window, QUERIES, KEYS)
        best = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
        for start in range(first, stop, KEYS):
            key = start + tl.arange(0, KEYS)
            k = _rows(k_ptr, k_first, key, k_stride, head // SHARED, dim, k_count, DIM)
            v = _rows(v_ptr, k_first, key, v_stride, head // SHARED, dim, k_count, DIM)
            scores = softcap * _tanh(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale / softcap))
            distance = position[:, None] - key[None, :]
            scores = tl.where((distance >= 0) & (distance < window), scores, -float("inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            base = tl.where(top == -float("inf"), 0.0, top)  # no key of this query's window yet
            weight = tl.exp(scores - base[:, None])
            shrink = tl.exp(best - base)
            total = total * shrink + tl.sum(weight, 1)
            sums = tl.dot(weight.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
            best = top
        row = (q_first + query).to(tl.int64)
        inside = query < q_count
        at = out_ptr + (row * HEADS + head)[:, None] * DIM + dim[None, :]
        out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(at, out, mask=inside[:, None] & (dim < DIM)[None, :])
        tl.store(lse_ptr + row * HEADS + head, best + tl.log(total), mask=inside)


@triton.jit
def _query_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, out_ptr, q_bounds_ptr, k_bounds_ptr,
    q_stride, k_stride, v_stride, scale, softcap, window,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    q_first, q_count, k_first, k_count = _bounds(q_bounds_ptr, k_bounds_ptr, sequence)
    begin = tl.program_id(0) * QUERIES
    if begin < q_count:
        query = begin + tl.arange(0, QUERIES)
        dim = tl.arange(0, DIM_BLOCK)
        position = tl.minimum(query, q_count - 1) + k_count - q_count
        q = _rows(q_ptr, q_first, query, q_stride, head, dim, q_count, DIM)
        grad = _rows(grad_ptr, q_first, query, HEADS * DIM, head, dim, q_count, DIM)
        row = (q_first + tl.minimum(query, q_count - 1)).to(tl.int64)
        lse = tl.load(lse_ptr + row * HEADS + head)
        delta = tl.load(delta_ptr + row * HEADS + head)
        first, stop = _key_span(begin, q_count, k_count, window, QUERIES, KEYS)
        sums = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
        for start in range(first, stop, KEYS):
            key = start + tl.arange(0, KEYS)
            k = _rows(k_ptr, k_first, key, k_stride, head // SHARED, dim, k_count, DIM)
            v = _rows(v_ptr, k_first, key, v_stride, head // SHARED, dim, k_count, DIM)
            bent = _tanh(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale / softcap))
            distance = position[:, None] - key[None, :]
            seen = (distance >= 0) & (distance < window)
            weight = tl.where(seen, tl.exp(softcap * bent - lse[:, None]), 0.0)
            slope = tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None]
            slope = weight * slope * (1.0 - bent * bent)
            sums = tl.dot(slope.to(k.dtype), k, sums, input_precision=PRECISION)
        at = out_ptr + ((q_first + query).to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
        inside = (query < q_count)[:, None] & (dim < DIM)[None, :]
        tl.store(at, (sums * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr, q_bounds_ptr, k_bounds_ptr,
    q_stride, k_stride, v_stride, scale, softcap, window,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    q_first, q_count, k_first, k_count = _bounds(q_bounds_ptr, k_bounds_ptr, sequence)
    begin = tl.program_id(0) * KEYS
    if begin < k_count:
        key = begin + tl.arange(0, KEYS)
        dim = tl.arange(0, DIM_BLOCK)
        k = _rows(k_ptr, k_first, key, k_stride, kv_head, dim, k_count, DIM)
        v = _rows(v_ptr, k_first, key, v_stride, kv_head, dim, k_count, DIM)
        key_sums = tl.zeros([KEYS, DIM_BLOCK], tl.float32)
        value_sums = tl.zeros([KEYS, DIM_BLOCK], tl.float32)
        first = tl.maximum(0, begin - (k_count - q_count)) // QUERIES * QUERIES
        stop = tl.minimum(q_count, begin + KEYS - 1 + window - (k_count - q_count))
        for shared in range(SHARED):
            head = kv_head * SHARED + shared
            for start in range(first, stop, QUERIES):
                query = start + tl.arange(0, QUERIES)
                position = query + k_count - q_count
                q = _rows(q_ptr, q_first, query, q_stride, head, dim, q_count, DIM)
                grad = _rows(grad_ptr, q_first, query, HEADS * DIM, head, dim, q_count, DIM)
                row = (q_first + tl.minimum(query, q_count - 1)).to(tl.int64)
                lse = tl.load(lse_ptr + row * HEADS + head)
                delta = tl.load(delta_ptr + row * HEADS + head)
                bent = _tanh(tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale / softcap))  # [keys, queries]
                distance = position[None, :] - key[:, None]
                seen = (distance >= 0) & (distance < window) & (query < q_count)[None, :]
                weight = tl.where(seen, tl.exp(softcap * bent - lse[None, :]), 0.0)
                value_sums = tl.dot(weight.to(grad.dtype), grad, value_sums, input_precision=PRECISION)
                slope = tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :]
                slope = weight * slope * (1.0 - bent * bent)
                key_sums = tl.dot(slope.to(q.dtype), q, key_sums, input_precision=PRECISION)
        row = (k_first + key).to(tl.int64)
        at = (row * (HEADS // SHARED) + kv_head)[:, None] * DIM + dim[None, :]
        inside = (key < k_count)[:, None] & (dim < DIM)[None, :]
        tl.store(grad_k_ptr + at, (key_sums * scale).to(grad_k_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_v_ptr + at, value_sums.to(grad_v_ptr.dtype.element_ty), mask=inside)


class _Plan(NamedTuple):
    """What a call has besides its tensors."""

    bounds: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    window: int | None
    softcap: float


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    window: int | None,
    softcap: float,
) -> Tensor:
    """Causal attention of packed queries [N, heads, D] over packed keys [M, kv_heads, D], aligned at each sequence's end.

    `bounds` are the int32 offsets of the sequences among queries and keys, `longest` their maximum lengths.
    """
    plan = _Plan(bounds, longest, window, softcap)
    q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
    return _PackedAttention.apply(q, k, v, plan) if torch.is_grad_enabled() else _attend(q, k, v, plan)[0]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        out, lse = _attend(q, k, v, plan)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        plan: _Plan = ctx.plan
        grad = grads[0].contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        sizes = _sizes(q, k, backward=True)
        numbers = _numbers(q, k, v, plan)
        per_query = triton.cdiv(plan.longest[0], sizes["QUERIES"]), q.shape[1], plan.bounds[0].shape[0] - 1
        _query_gradient[per_query](q, k, v, grad, lse, delta, grad_q, *plan.bounds, *numbers, **sizes)
        per_key = triton.cdiv(plan.longest[1], sizes["KEYS"]), k.shape[1], plan.bounds[0].shape[0] - 1
        _key_gradient[per_key](q, k, v, grad, lse, delta, grad_k, grad_v, *plan.bounds, *numbers, **sizes)
        return grad_q, grad_k, grad_v, None


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """The output [N, heads, D] and the log-sum-exp of the scores [N, heads]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    sizes = _sizes(q, k, backward=False)
    grid = triton.cdiv(plan.longest[0], sizes["QUERIES"]), q.shape[1], plan.bounds[0].shape[0] - 1
    _forward[grid](q, k, v, out, lse, *plan.bounds, *_numbers(q, k, v, plan), **sizes)
    return out, lse


def _numbers(q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> tuple[float, ...]:
    """Row strides, scale, soft cap and window."""
    window = NO_WINDOW if plan.window is None else plan.window
    return q.stride(0), k.stride(0), v.stride(0), q.shape[2] ** -0.5, plan.softcap, window


def _sizes(q: Tensor, k: Tensor, backward: bool) -> dict[str, Any]:
    """Compile-time sizes. Wide heads and float32 have smaller blocks, so that they fit in shared memory."""
    dim_block = max(16, triton.next_power_of_2(q.shape[2]))
    is_large = dim_block * q.element_size() > 256
    return {
        "HEADS": q.shape[1],
        "SHARED": q.shape[1] // k.shape[1],
        "DIM": q.shape[2],
        "DIM_BLOCK": dim_block,
        "QUERIES": 32 if is_large and backward else 64,
        "KEYS": 32 if is_large else 64,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": 8 if is_large and backward else 4,
        "num_stages": 2,
    }
