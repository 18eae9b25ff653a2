"""Causal attention on packed sequences: no sequence sees its neighbour.

Sequences of similar length are stacked for one call of torch's fused attention; since the mask is causal and padding
comes last, no query of a real token can see it, so no mask tensor is needed. Padding lives inside this function
alone. Buckets are cut so that at most about a quarter of a stack is padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

WASTE = 1.25  # a bucket's longest sequence over its shortest


class PackedAttention:
    """Attention for one packing; planned once, called by every layer as `attend(layer, q, k, v)`."""

    def __init__(self, offsets: Tensor, window: int | None = None) -> None:
        self.offsets = offsets
        self.window = window
        lengths = offsets.diff().tolist()
        self.uniform = lengths[0] if lengths and min(lengths) == max(lengths) else None
        self.buckets = [] if self.uniform else _plan(lengths, offsets)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N, heads, D] queries against [N, kv_heads, D] keys and values."""
        if self.uniform:
            shape = (-1, self.uniform)
            q, k, v = (x.reshape(*shape, *x.shape[1:]) for x in (q, k, v))
            return _causal(q, k, v, self.window).flatten(0, 1)
        out = torch.empty_like(q)
        for gather, keep, where in self.buckets:
            stacked = _causal(q[gather], k[gather], v[gather], self.window)
            out = out.index_copy(0, where, stacked[keep])
        return out


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """[b, L, H, D] in and out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None
    if window is not None and q.shape[2] > window:
        near = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        mask = near.tril() & ~near.tril(-window)
    out = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def _plan(lengths: list[int], offsets: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(gather [b, L], keep [b, L], where [kept]) of each bucket of sequences of similar length."""
    order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: lengths[i])
    buckets: list[list[int]] = []
    for i in order:
        if buckets and lengths[i] <= max(lengths[buckets[-1][0]] * WASTE, lengths[buckets[-1][0]] + 4):
            buckets[-1].append(i)
        else:
            buckets.append([i])
    plans = []
    for bucket in buckets:
        width = lengths[bucket[-1]]
        index = torch.tensor(bucket, device=offsets.device)
        start, length = offsets[index][:, None], offsets.diff()[index][:, None]
        column = torch.arange(width, device=offsets.device)
        keep = column < length
        gather = start + torch.minimum(column, length - 1)
        plans.append((gather, keep, gather[keep]))
    return plans
