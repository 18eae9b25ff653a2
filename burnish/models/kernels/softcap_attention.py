"""Causal attention with soft-capped scores in torch, for devices without Triton (`triton/packed_attention.py` has the kernel).

    s = cap * tanh(q k^T / (cap sqrt(D))),   ds / d(q k^T / sqrt(D)) = 1 - (s / cap)^2

Sequences of similar length are stacked, and the scores of a stack are explicit. As in flash attention the backward computes them again
from the log-sum-exp, so that a layer saves no scores. A row that several sequences share (`shared_prefix.py`) is read by each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_SCORES = 1 << 25
"""Scores held at once."""

Stack = tuple[Tensor, Tensor]
"""The row of each token [b, L], and whether the token's result is that of its row [b, L]; it is not for padding and shared rows."""


def softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, stacks: Sequence[Stack], window: int | None, softcap: float
) -> Tensor:
    """Attention of queries [U, heads, D] over keys and values [U, kv_heads, D] of their sequences; [U, heads, D]."""
    return _SoftcappedAttention.apply(q, k, v, stacks, window, softcap)


class _SoftcappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, stacks: Sequence[Stack], window: int | None, softcap: float
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for rows, is_own in _parts(stacks, q.shape[1]):
            scores, _ = _scores(q[rows], k[rows], window, softcap)
            found = scores.logsumexp(-1)  # [b, kv_heads, shared, L]
            mixed = (scores - found[..., None]).exp_() @ _keys(v[rows])
            out[rows[is_own]] = _by_token(mixed)[is_own].to(out.dtype)
            lse[rows[is_own]] = found.flatten(1, 2).transpose(1, 2)[is_own]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = stacks, window, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        stacks, window, softcap = ctx.plan
        scale = q.shape[2] ** -0.5
        totals = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        for rows, is_own in _parts(stacks, q.shape[1]):
            scores, bent = _scores(q[rows], k[rows], window, softcap)
            weights = (scores - _heads(lse[rows][..., None], k.shape[1])).exp_()
            # Padding and rows of other sequences have no gradient here.
            grad = _heads(grads[0][rows].to(lse.dtype) * is_own[..., None, None], k.shape[1])
            delta = (grad * _heads(out[rows], k.shape[1])).sum(-1, keepdim=True)
            slope = weights * (grad @ _keys(v[rows]).transpose(-1, -2) - delta) * (1 - bent.square()) * scale
            grad_q = _by_token(slope @ _keys(k[rows]))
            grad_k = (slope.transpose(-1, -2) @ _heads(q[rows], k.shape[1])).sum(2).transpose(1, 2)
            grad_v = (weights.transpose(-1, -2) @ grad).sum(2).transpose(1, 2)
            for total, part in zip(totals, (grad_q, grad_k, grad_v), strict=True):
                total.index_add_(0, rows.flatten(), part.flatten(0, 1).to(total.dtype))
        return *(total.to(q.dtype) for total in totals), None, None, None


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Mask [query, key]: the key is not later than the query, and within the window."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask & ~mask.tril(-window)


def _parts(stacks: Sequence[Stack], heads: int) -> Iterator[Stack]:
    """The stacks, cut so that the scores of a part fit."""
    for rows, is_own in stacks:
        size = max(1, MAX_SCORES // (heads * rows.shape[1] ** 2))
        yield from zip(rows.split(size), is_own.split(size), strict=True)


def _scores(q: Tensor, k: Tensor, window: int | None, softcap: float) -> tuple[Tensor, Tensor]:
    """Capped scores [b, kv_heads, shared, L, L] of stacked queries, -inf where a key is not seen, and tanh(score / cap)."""
    product = _heads(q, k.shape[2]) @ _keys(k).transpose(-1, -2)
    bent = (product * (q.shape[3] ** -0.5 / softcap)).tanh_()
    return (bent * softcap).masked_fill_(~causal_mask(q.shape[1], window, q.device), -torch.inf), bent


def _heads(x: Tensor, kv_heads: int) -> Tensor:
    """[b, L, heads, D] to [b, kv_heads, shared, L, D], in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide).transpose(1, 2).unflatten(1, (kv_heads, -1))


def _keys(x: Tensor) -> Tensor:
    """[b, L, kv_heads, D] to [b, kv_heads, 1, L, D], in float32 at least."""
    return _heads(x, x.shape[2])


def _by_token(x: Tensor) -> Tensor:
    """[b, kv_heads, shared, L, D] to [b, L, heads, D]."""
    return x.flatten(1, 2).transpose(1, 2)
