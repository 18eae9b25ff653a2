"""The operations of a forward pass over a paged cache: Triton and CUDA kernels on a GPU, their torch twins elsewhere.

Pages are [P, kv_heads, page, D], one tensor (or its 8-bit form) for keys and one for values a layer; `table` [rows, width] names the pages
of each row in order. A token is located by its row and position; position -1 means a row that is not there: it sees
nothing, and what it writes goes to page 0, if anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.architecture import Windows
from burnish.models.kernels.attention import has_varlen, varlen_attention, window_of
from burnish.models.kernels.device import send, use_kernels
from burnish.models.kernels.elementwise import rms_norm, rotate
from burnish.models.kernels.paged_layout import Norms, Placement
from burnish.models.quantization.fp8_cache import Pages, read, write


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """x += delta in place (if there is one), then the RMS norm of x times shift + weight; [N, hidden].

    Parts [P, N, hidden] are added up first.
    """
    if use_kernels(x):
        from burnish.models.kernels.triton import rows

        return rows.add_norm(x, delta, weight, eps, shift)
    if delta is not None:
        x += delta if delta.dim() == 2 else delta.sum(0, dtype=torch.promote_types(delta.dtype, torch.float32))
    return rms_norm(x, weight, eps, shift)


def rotate_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: Placement,
    norms: Norms | None,
    keys: Pages,
    values: Pages,
    in_place: bool = False,
) -> Tensor:
    """Rotated queries [N, heads, D] of a fused projection [N, heads * D]; keys and values go to their cache slots.

    `in_place` has the projection's own keys rotated too.
    """
    if use_kernels(qkv):
        from burnish.models.kernels.triton import rows

        return rows.rotate_store(qkv, cos, sin, place, norms, keys, values, in_place)
    _, kv_heads, page, dim = keys.shape
    position = place.position
    heads = qkv.view(qkv.shape[0], -1, dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (rms_norm(x, weight, norms.eps, norms.shift) for x, weight in ((q, norms.query), (k, norms.key)))
        q = q if norms.query_scale == 1.0 else q * norms.query_scale
    q, k = (rotate(x, cos[position], sin[position]) for x in (q, k))
    where = place.table[place.owner, position.clamp(min=0) // page].long().masked_fill(position < 0, 0)
    at = (where, slice(None), position % page)
    write(keys, at, k)
    write(values, at, v)
    if in_place:
        heads[:, -2 * kv_heads : -kv_heads] = k
    return q


def decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: Placement,
    norms: Norms | None,
    keys: Pages,
    values: Pages,
    window: int | None,
    splits: int = 1,
    least: int = 64,
) -> Tensor:
    """[rows, heads * D]: each row's new token, as its fused projection, against what the row holds and itself.

    Row i of the table is token i's. On a GPU rows are cut into up to `splits` stretches of at least `least` keys.
    """
    if use_kernels(qkv):
        from burnish.models.kernels.cuda import hopper
        from burnish.models.kernels.triton.decode_step import decode_step

        if hopper.has_decode_attention(qkv, cos, place, norms, keys, values):
            assert isinstance(keys, Tensor)
            assert isinstance(values, Tensor)
            return hopper.decode_attention(qkv, cos, sin, place, norms, keys, values, window, splits, least)
        return decode_step(qkv, cos, sin, place, norms, keys, values, window, splits, least)
    return attend_pages(rotate_store(qkv, cos, sin, place, norms, keys, values), keys, values, place, window)


def attend_pages(q: Tensor, keys: Pages, values: Pages, place: Placement, window: int | None) -> Tensor:
    """[rows, heads * D]: each row's query [rows, heads, D] against the pages it holds, by torch."""
    rows, heads, dim = q.shape
    position, table = place.position, place.table
    longest = int(position.max()) + 1
    if longest <= 0:
        return q.new_zeros(rows, heads * dim)
    k, v = (gather_pages(x, table[:rows], longest, q.dtype) for x in (keys, values))  # [rows, kv_heads, longest, D]
    column = torch.arange(longest, device=q.device)
    seen = column <= position[:, None]
    if window is not None:
        seen &= column > position[:, None] - window
    shared = heads // k.shape[1]
    scores = q.view(rows, -1, shared, dim) @ k.transpose(2, 3) * dim**-0.5
    # A row that sees nothing would be NaN: it is given its first column, and nobody reads it.
    seen[:, 0] |= position < 0
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    # What a page held before may be NaN, and 0 * NaN is too.
    return (weights @ v.masked_fill(~seen[:, None, :, None], 0)).view(rows, heads * dim)


def gather_pages(pages: Pages, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` tokens of every row as [rows, kv_heads, length, D]."""
    page = pages.shape[2]
    found = read(pages, table[:, : -(-length // page)].long(), dtype)  # [rows, pages, kv_heads, page, D]
    return found.transpose(1, 2).flatten(2, 3)[:, :, :length]


# --- Attention of a prefill: stretches of new tokens against their rows' cached past and themselves.
#
# Where a stretch continues a row (a shared prompt prefix, a long prompt in chunks), keys and values are read back from the rows'
# pages, to which the forward has just written the new ones: so a prefix that another stretch of the same forward computes is no
# special case. The new tokens are the last of their row, so causality is aligned at the end.


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
