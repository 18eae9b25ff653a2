"""Attention of a prefill: stretches of new tokens against their rows' cached past and themselves.

Keys and values are read back from the rows' pages, where the forward has just written the new ones: so a stretch that
continues (a shared prompt prefix, a long prompt in chunks) is no special case, nor is a prefix that another stretch of
the same forward computes. The new tokens are the last of their row, so causality is aligned at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.architecture import Windows
from burnish.models.ops.attention import window_of
from burnish.models.ops.paged import Norms, Placement, rotate_store
from burnish.models.ops.quantised import Pages, read
from burnish.models.ops.transfer import send
from burnish.models.ops.varlen import has_varlen, varlen_attention


class PrefillAttention:
    """Planned once for a forward, called by every layer; `rotations` has the table of each."""

    def __init__(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        place: Placement,
        rotations: Sequence[tuple[Tensor, Tensor]],
        page: int,
        windows: Windows,
    ) -> None:
        ends = starts + lengths
        self.lengths, self.ends, self.windows = lengths.tolist(), ends.tolist(), windows
        self.place, self.rotations = place, rotations
        device = place.position.device
        position = np.concatenate([np.arange(end) for end in ends])
        owner, which, self.offset = (
            send(x, device) for x in (np.repeat(rows, ends), position // page, position % page)
        )
        self.pages = place.table[owner, which].long()  # of every token that is seen
        self.q_bounds, self.k_bounds = (
            send(np.concatenate([[0], np.cumsum(x)]).astype(np.int32), device) for x in (lengths, ends)
        )

    def __call__(self, layer: int, qkv: Tensor, norms: Norms | None, keys: Pages, values: Pages) -> Tensor:
        q = rotate_store(qkv, *self.rotations[layer], self.place, norms, keys, values)
        return self._attention(q, keys, values, window_of(self.windows, layer)).flatten(1)

    def _attention(self, q: Tensor, keys: Pages, values: Pages, window: int | None) -> Tensor:
        k, v = (
            read(x, (self.pages, slice(None), self.offset), q.dtype) for x in (keys, values)
        )  # [all ends, kv_heads, D]
        if has_varlen(q):
            longest = max(self.lengths), max(self.ends)
            return varlen_attention(q, k, v, (self.q_bounds, self.k_bounds), longest, window)
        parts = zip(q.split(self.lengths), k.split(self.ends), v.split(self.ends), strict=True)
        return torch.cat([self._one(*part, window) for part in parts])

    def _one(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """One stretch, [length, heads, D] against [end, kv_heads, D]."""
        index = torch.arange(k.shape[0], device=q.device)
        distance = index[-q.shape[0] :, None] - index
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        gqa = q.shape[0] != k.shape[0]
        return functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=gqa).transpose(0, 1)
