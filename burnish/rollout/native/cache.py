"""The key/value cache of the native engine: one row a running sequence, rows kept dense.

Rows 0..n-1 are always the running ones: when a sequence ends, the last row moves into its place, so every decode
step works on plain slices and no row-step is spent on a finished sequence. Capacity along time grows by doubling
with the sequences that are really there, not with the longest they might become.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.architecture import Architecture
from burnish.models.ops.attention import PackedAttention, window_of


class KVCache:
    """Keys and values of all rows, [layers, rows, kv_heads, capacity, head_dim] each."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.rows, self.capacity = 0, 0
        self.keys = self.values = self._empty(0, 0)

    def _empty(self, rows: int, capacity: int) -> Tensor:
        shape = (self.arch.num_layers, rows, self.arch.num_kv_heads, capacity, self.arch.head_dim)
        # Zeros, not empty: what a mask hides must still be finite, or 0 * NaN would leak into the sum.
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int, length: int) -> None:
        """Room for `rows` rows of `length` tokens; grows, never shrinks."""
        if rows <= self.rows and length <= self.capacity:
            return
        new_rows = max(rows, self.rows)
        capacity = self.capacity if length <= self.capacity else max(64, length, 2 * self.capacity)
        for name in ("keys", "values"):
            old, new = getattr(self, name), self._empty(new_rows, capacity)
            new[:, : self.rows, :, : self.capacity] = old
            setattr(self, name, new)
        self.rows, self.capacity = new_rows, capacity

    def release(self) -> None:
        """Give the memory back."""
        self.rows = self.capacity = 0
        self.keys = self.values = self._empty(0, 0)

    def put_prompt(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Write one prompt's [layers, length, kv_heads, head_dim] into each of the rows."""
        length = keys.shape[1]
        self.keys[:, rows, :, :length] = keys.transpose(1, 2)[:, None]
        self.values[:, rows, :, :length] = values.transpose(1, 2)[:, None]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row into another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


class PrefillAttention:
    """Packed attention that keeps the keys and values it saw, for the cache."""

    def __init__(self, packed: PackedAttention, num_layers: int) -> None:
        self.packed = packed
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer], self.values[layer] = k, v
        return self.packed(layer, q, k, v)


class DecodeAttention:
    """One query a row against its cached past, which it first extends by the query's own key and value.

    The query heads that share a key head stand as so many queries of that head: no key is repeated. In float32 and
    float64 the scores are explicit, which for a few queries is faster than the fused kernel; in half types the fused
    kernel keeps them in float32.
    """

    def __init__(self, cache: KVCache, positions: Tensor, longest: int, shortest: int) -> None:
        arch, rows = cache.arch, positions.shape[0]
        self.cache, self.rows, self.width = cache, rows, longest + 1
        heads = torch.arange(rows * arch.num_kv_heads, device=positions.device).view(rows, -1)
        self.slots = (heads * cache.capacity + positions[:, None]).view(-1)
        self.windows = arch.windows
        kinds = set(self.windows) if isinstance(self.windows, tuple) else {self.windows}
        self.hidden = {window: self._hidden(positions, longest, shortest, window) for window in kinds}

    def _hidden(self, positions: Tensor, longest: int, shortest: int, window: int | None) -> Tensor | None:
        """[rows * kv_heads, 1, width]: -inf where a query must not look; None where all look at everything."""
        if shortest == longest and (window is None or longest < window):
            return None
        column = torch.arange(self.width, device=positions.device)
        hidden = column > positions[:, None]
        if window is not None:
            hidden |= column <= positions[:, None] - window
        bias = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=positions.device)
        return bias.masked_fill_(hidden, -torch.inf).repeat_interleave(self.cache.arch.num_kv_heads, 0)[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, arch = self.cache, self.cache.arch
        for store, new in ((cache.keys, k), (cache.values, v)):
            store[layer].view(-1, arch.head_dim).index_copy_(0, self.slots, new.reshape(-1, arch.head_dim))
        stop = self.rows * arch.num_kv_heads
        keys, values = (x[layer].flatten(0, 1)[:stop, : self.width] for x in (cache.keys, cache.values))
        queries = q.reshape(self.rows * arch.num_kv_heads, -1, arch.head_dim)
        hidden = self.hidden[window_of(self.windows, layer)]
        if cache.dtype in (torch.float32, torch.float64):
            out = _explicit(queries, keys, values, hidden)
        else:
            out = functional.scaled_dot_product_attention(queries, keys, values, hidden)
        return out.reshape(q.shape)


def _explicit(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    scale = queries.shape[-1] ** -0.5
    if hidden is None:
        scores = torch.bmm(queries * scale, keys.transpose(1, 2))
    else:
        scores = torch.baddbmm(hidden, queries, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), values)
