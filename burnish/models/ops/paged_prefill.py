"""Attention of a prefill: stretches of new tokens against their rows' cached past and themselves.

Where a stretch continues a row (a shared prompt prefix, a long prompt in chunks), keys and values are read back from the rows'
pages, to which the forward has just written the new ones: so a prefix that another stretch of the same forward computes is no
special case. The new tokens are the last of their row, so causality is aligned at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

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
        self.rows, self.starts, self.lengths, self.ends = rows, starts, lengths, starts + lengths
        self.place, self.rotations, self.page, self.windows = place, rotations, page, windows
        self.q_bounds, self.k_bounds = (
            self._send(np.concatenate([[0], np.cumsum(x)]).astype(np.int32)) for x in (lengths, self.ends)
        )

    @cached_property
    def _seen(self) -> tuple[Tensor, slice, Tensor]:
        """Where every token that is seen lies among the pages."""
        position = np.concatenate([np.arange(end) for end in self.ends])
        owner, which, offset = (
            self._send(x) for x in (np.repeat(self.rows, self.ends), position // self.page, position % self.page)
        )
        return self.place.table[owner, which].long(), slice(None), offset

    def _send(self, array: np.ndarray) -> Tensor:
        return send(array, self.place.position.device)

    def __call__(self, layer: int, qkv: Tensor, norms: Norms | None, keys: Pages, values: Pages) -> Tensor:
        # What is kept in 8 bits is attended to as it is kept.
        reads_back = bool(self.starts.any()) or not isinstance(keys, Tensor)
        q = rotate_store(qkv, *self.rotations[layer], self.place, norms, keys, values, in_place=not reads_back)
        if reads_back:
            k, v = (read(x, self._seen, q.dtype) for x in (keys, values))  # [all ends, kv_heads, D]
        else:
            _, kv_heads, _, dim = keys.shape
            k, v = qkv.view(qkv.shape[0], -1, dim)[:, -2 * kv_heads :].split(kv_heads, 1)
        return self._attention(q, k, v, window_of(self.windows, layer)).flatten(1)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if has_varlen(q):
            longest = int(self.lengths.max()), int(self.ends.max())
            return varlen_attention(q, k, v, (self.q_bounds, self.k_bounds), longest, window)
        lengths, ends = self.lengths.tolist(), self.ends.tolist()
        parts = zip(q.split(lengths), k.split(ends), v.split(ends), strict=True)
        return torch.cat([self._one(*part, window) for part in parts])

    def _one(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """One stretch, [length, heads, D] against [end, kv_heads, D]."""
        index = torch.arange(k.shape[0], device=q.device)
        distance = index[-q.shape[0] :, None] - index
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        gqa = q.shape[0] != k.shape[0]
        return functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=gqa).transpose(0, 1)
