"""Causal attention on packed sequences: no sequence sees its neighbour.

In half types on a GPU torch has a kernel for it. On a CPU short sequences go through explicit scores (`ops/stacked.py`).
Elsewhere sequences of similar length are stacked for one call of torch's fused attention; since the mask is causal and
padding comes last, no query of a real token can see it, so no mask tensor is needed. Padding lives inside this function
alone. Buckets are cut so that at most about a quarter of a stack is padding.

Where sequences share their beginnings (`ops/trunks.py`) queries, keys and values are rows of their own only. Every
sequence gets the keys and values of its whole past; the kernel takes queries that are fewer than keys, the stacks take
the queries of shared rows too and leave their results alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.architecture import Windows
from burnish.models.ops.stacked import WASTE, Stacks, stacked_attention, visible
from burnish.models.ops.trunks import Rows, spread
from burnish.models.ops.varlen import has_varlen, varlen_attention

SHORT = 256  # on a CPU, packings of sequences up to this length go through explicit scores


class PackedAttention:
    """Attention for one packing; planned once, called by every layer as `attend(layer, q, k, v)`."""

    def __init__(self, offsets: Tensor, windows: Windows = None, rows: Rows | None = None) -> None:
        self.offsets = offsets
        self.windows = windows
        self.rows = rows
        self.lengths = offsets.diff().tolist()
        self.uniform = self.lengths[0] if self.lengths and min(self.lengths) == max(self.lengths) else None
        self._buckets: list[tuple[Tensor, Tensor, Tensor]] | None = [] if self.uniform else None
        self._stacks: Stacks | None = None

    @property
    def buckets(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(gather [b, L], keep [b, L], where [kept]) of each bucket of sequences of similar length."""
        if self._buckets is None:
            self._buckets = _plan(self.lengths, self.offsets)
        return self._buckets

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N, heads, D] queries against [N, kv_heads, D] keys and values; [U, ...] all of them where rows are shared."""
        window = window_of(self.windows, layer)
        if any(self.lengths) and _is_short(max(self.lengths), q):
            self._stacks = self._stacks or Stacks(self.lengths, self.offsets, self.rows)
            return stacked_attention(q, k, v, self._stacks, window)
        if self.rows is not None:
            return self._shared(self.rows, q, k, v, window)
        return self._whole(q, k, v, window)

    def _shared(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        k, v = spread(k, rows), spread(v, rows)
        if has_varlen(q):
            bounds = rows.offsets.int(), self.offsets.int()
            longest = int(rows.offsets.diff().max()), max(self.lengths)
            return varlen_attention(q, k, v, bounds, longest, window)
        return self._whole(spread(q, rows), k, v, window).index_select(0, rows.own)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if self.uniform:
            shape = (-1, self.uniform)
            q, k, v = (x.reshape(*shape, *x.shape[1:]) for x in (q, k, v))
            return _causal(q, k, v, window).flatten(0, 1)
        if has_varlen(q):
            bounds, longest = self.offsets.int(), max(self.lengths)
            return varlen_attention(q, k, v, (bounds, bounds), (longest, longest), window)
        out = torch.empty_like(q)
        for gather, keep, where in self.buckets:
            stacked = _causal(q[gather], k[gather], v[gather], window)
            out = out.index_copy(0, where, stacked[keep])
        return out


def window_of(windows: Windows, layer: int) -> int | None:
    """How far a layer looks back."""
    return windows[layer] if isinstance(windows, tuple) else windows


def _is_short(length: int, q: Tensor) -> bool:
    return length <= SHORT and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)


@lru_cache(maxsize=16)
def _equal(num: int, length: int) -> Stacks:
    """For a bucket among longer ones: every layer asks for it."""
    return Stacks([length] * num, torch.arange(num + 1) * length, None)


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """[b, L, H, D] in and out."""
    length = q.shape[1]
    if _is_short(length, q):
        stacks = _equal(q.shape[0], length)
        return stacked_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), stacks, window).view(q.shape)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = visible(length, window, q.device) if window is not None and length > window else None
    gqa = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)
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
