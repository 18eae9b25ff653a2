"""The key/value cache of the native engine: one row a running sequence, rows kept dense.

Rows 0..n-1 are always the running ones: when a sequence ends, the last row moves into its place, so every decode
step works on plain slices and no row-step is spent on a finished sequence. Capacity along time grows by doubling
with the sequences that are really there, not with the longest they might become.

Keys stand with time last: a few queries times a matrix that lies as the product reads it take two thirds of the time they take
against its transpose, half of it for some hundred tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from burnish.core.engine import Completion, Request
from burnish.core.random_keys import to_int64
from burnish.models.architecture import Architecture
from burnish.models.kernels.attention import PackedAttention, window_of

CAPACITY_MULTIPLE = 16
"""A capacity is an odd multiple of this: rows a power of two apart would share the same few places of a processor's cache."""


class DenseKVCache:
    """Keys [layers, rows, kv_heads, head_dim, capacity] and values [layers, rows, kv_heads, capacity, head_dim] of all rows."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.rows, self.capacity = 0, 0
        self.keys, self.values = self._empty(0, 0)

    def _empty(self, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
        arch = self.arch
        # Zeros, not empty: what a mask hides must still be finite, or 0 * NaN would leak into the sum.
        zeros = torch.zeros(
            2, arch.num_layers, rows, arch.num_kv_heads, capacity * arch.head_dim, dtype=self.dtype, device=self.device
        )
        return zeros[0].unflatten(-1, (arch.head_dim, capacity)), zeros[1].unflatten(-1, (capacity, arch.head_dim))

    def reserve(self, rows: int, length: int, running: int = 0) -> None:
        """Room for `rows` rows of `length` tokens, of which the first `running` keep what they have.

        What must be made anew is as large as is needed now: the many short rows of an earlier time, each as long as the one of now, may
        be more memory than there is.
        """
        if rows <= self.rows and length <= self.capacity:
            return
        if not running:
            self.release()  # its memory first
        old = self.capacity
        capacity = old if length <= old else _odd_multiple(max(64, length, 2 * old))
        keys, values = self._empty(rows, capacity)
        keys[:, :running, :, :, :old] = self.keys[:, :running]
        values[:, :running, :, :old] = self.values[:, :running]
        self.keys, self.values, self.rows, self.capacity = keys, values, rows, capacity

    def clear(self, row: int) -> None:
        """Forget all that a row holds: what a mask hides must be finite."""
        self.keys[:, row] = 0
        self.values[:, row] = 0

    def release(self) -> None:
        """Give the memory back."""
        self.rows = self.capacity = 0
        self.keys, self.values = self._empty(0, 0)

    def put_prompt(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Write one prompt's [layers, length, kv_heads, head_dim] into each of the rows."""
        length = keys.shape[1]
        self.keys[:, rows, :, :, :length] = keys.permute(0, 2, 3, 1)[:, None]
        self.values[:, rows, :, :length] = values.transpose(1, 2)[:, None]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row into another."""
        self.keys[:, target, :, :, :length] = self.keys[:, source, :, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


def _odd_multiple(capacity: int) -> int:
    return (-(-capacity // CAPACITY_MULTIPLE) | 1) * CAPACITY_MULTIPLE


class DensePrefillAttention:
    """Packed attention that keeps the keys and values it saw, for the cache."""

    def __init__(self, packed: PackedAttention, num_layers: int) -> None:
        self.packed = packed
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer], self.values[layer] = k, v
        return self.packed(layer, q, k, v)


class DenseDecodeAttention:
    """One query a row against its cached past, which it first extends by the query's own key and value.

    The query heads that share a key head stand as so many queries of that head: no key is repeated. In float32 and
    float64 the scores are explicit, which for a few queries is faster than the fused kernel; in half types the fused
    kernel keeps them in float32. What all layers need is made once.
    """

    def __init__(self, cache: DenseKVCache, positions: Tensor, longest: int, shortest: int) -> None:
        arch, rows, width = cache.arch, positions.shape[0], longest + 1
        self.dtype, self.num_kv_heads, self.windows = cache.dtype, arch.num_kv_heads, arch.windows
        heads = torch.arange(rows * arch.num_kv_heads, device=positions.device).view(rows, -1, 1)
        dims = torch.arange(0, arch.head_dim * cache.capacity, cache.capacity, device=positions.device)
        first = heads * cache.capacity + positions[:, None, None]  # of a head that is one number wide
        self.value_slots = first.view(-1)
        self.key_slots = (heads * (cache.capacity * arch.head_dim) + positions[:, None, None] + dims).view(-1)
        self.key_stores = cache.keys.flatten(1).unbind()
        self.value_stores = cache.values.flatten(1, 3).unbind()
        stop = rows * arch.num_kv_heads
        self.keys = cache.keys.flatten(1, 2)[:, :stop, :, :width].unbind()
        self.values = cache.values.flatten(1, 2)[:, :stop, :width].unbind()
        self.scale = arch.head_dim**-0.5
        kinds = set(self.windows) if isinstance(self.windows, tuple) else {self.windows}
        self.hidden = {window: self._hidden(positions, longest, shortest, window) for window in kinds}

    def _hidden(self, positions: Tensor, longest: int, shortest: int, window: int | None) -> Tensor | None:
        """[rows * kv_heads, 1, width]: -inf where a query must not look; None where all look at everything."""
        if shortest == longest and (window is None or longest < window):
            return None
        column = torch.arange(longest + 1, device=positions.device)
        hidden = column > positions[:, None]
        if window is not None:
            hidden |= column <= positions[:, None] - window
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=positions.device)
        return bias.masked_fill_(hidden, -torch.inf).repeat_interleave(self.num_kv_heads, 0)[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dim = q.shape[-1]
        self.key_stores[layer].put_(self.key_slots, k)
        self.value_stores[layer].index_copy_(0, self.value_slots, v.reshape(-1, dim))
        queries, keys, values = q.reshape(self.values[layer].shape[0], -1, dim), self.keys[layer], self.values[layer]
        hidden = self.hidden[window_of(self.windows, layer)]
        if self.dtype in (torch.float32, torch.float64):
            shape = (*queries.shape[:2], keys.shape[2])
            # Where nothing is hidden what stands there is not read.
            bias, share = (queries.new_empty(1).expand(shape), 0) if hidden is None else (hidden, 1)
            scores = torch.baddbmm(bias, queries, keys, beta=share, alpha=self.scale)
            out = torch.bmm(scores.softmax(-1), values)
        else:
            out = functional.scaled_dot_product_attention(queries, keys.transpose(1, 2), values, hidden)
        return out.view(q.shape)


# --- The running rows of the native engine: everything a decode step needs to know about each, as arrays.
#
# Row i of every array belongs to `requests[i]`; rows stay dense, like the cache's. A hundred numbers are added to or compared
# faster by numpy than by torch, so the columns are arrays; what the model and the sampler read is also a tensor on the same memory.


class OptionsInUse(NamedTuple):
    """What any of the rows asks of a draw beside a token at temperature 1."""

    temperature: bool
    top_k: bool
    top_p: bool
    min_p: bool
    bias: bool
    raw_logprobs: bool
    stops: bool
    """Whether a token or a string may end a row before its limit."""


class RunningRows:
    """State of up to `size` running requests."""

    def __init__(self, size: int) -> None:
        self.requests: list[Request] = []
        self.versions: list[int] = []
        self.last_token = np.zeros(size, dtype=np.int64)
        self.position = np.zeros(size, dtype=np.int64)  # where the last token stands in its sequence
        self.produced = np.zeros(size, dtype=np.int64)
        self.limit = np.zeros(size, dtype=np.int64)
        self.key = np.zeros(size, dtype=np.int64)
        self.drawn = np.zeros(size, dtype=np.int64)  # tokens drawn for this sample, earlier requests included
        self.temperature = np.zeros(size, dtype=np.float64)
        self.top_k = np.zeros(size, dtype=np.int64)
        self.top_p = np.zeros(size, dtype=np.float64)
        self.min_p = np.zeros(size, dtype=np.float64)
        self.tokens = np.zeros((size, 0), dtype=np.int64)
        self.logp = np.zeros((size, 0), dtype=np.float32)
        self.raw_logp = np.zeros((size, 0), dtype=np.float32)  # of rows whose requests ask for it
        self.index = np.arange(size)
        self.tokens_in, self.positions = torch.from_numpy(self.last_token), torch.from_numpy(self.position)
        self._wants: OptionsInUse | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def wants(self) -> OptionsInUse:
        """Of all rows; looked at again when they are others."""
        if self._wants is None:
            options = {id(request.sampling): request.sampling for request in self.requests}.values()
            self._wants = OptionsInUse(
                any(o.temperature != 1 for o in options),
                any(o.top_k for o in options),
                any(o.top_p < 1 for o in options),
                any(o.min_p > 0 for o in options),
                any(o.logit_bias for o in options),
                any(o.raw_logprobs for o in options),
                any(o.stop_tokens or o.stop for o in options),
            )
        return self._wants

    def add(self, request: Request, version: int) -> int:
        """A new row at the end; its prompt is in the cache, its first token not yet drawn."""
        i, options = len(self.requests), request.sampling
        self.requests.append(request)
        self.versions.append(version)
        self.position[i] = len(request.tokens) - 1
        self.produced[i] = 0
        self.limit[i] = options.max_tokens
        self.key[i] = to_int64(request.key)
        self.drawn[i] = request.generated
        self.temperature[i] = options.temperature
        self.top_k[i] = options.top_k
        self.top_p[i] = options.top_p
        self.min_p[i] = options.min_p
        self._wants = None
        return i

    def record(self, rows: slice, tokens: np.ndarray, logp: np.ndarray, raw_logp: np.ndarray | None) -> None:
        """Append one drawn token to each of the rows."""
        index, column = self.index[rows], self.produced[rows]
        longest = int(column.max()) + 1
        if longest > self.tokens.shape[1]:
            self._grow(max(64, 2 * self.tokens.shape[1], longest))
        self.tokens[index, column] = tokens
        self.logp[index, column] = logp
        if raw_logp is not None:
            self.raw_logp[index, column] = raw_logp
        self.last_token[rows] = tokens
        for count in (self.position, self.produced, self.drawn):
            count[rows] += 1

    def _grow(self, capacity: int) -> None:
        for name in ("tokens", "logp", "raw_logp"):
            old = getattr(self, name)
            setattr(self, name, np.pad(old, ((0, 0), (0, capacity - old.shape[1]))))

    def completion(self, row: int, finish: str) -> Completion:
        """What a row has produced."""
        count, raw = int(self.produced[row]), self.requests[row].sampling.raw_logprobs
        return Completion(
            id=self.requests[row].id,
            tokens=self.tokens[row, :count].copy(),
            logp=self.logp[row, :count].copy(),
            finish=finish,  # type: ignore[arg-type]
            version=self.versions[row],
            raw_logp=self.raw_logp[row, :count].copy() if raw else None,
        )

    def is_nan(self, row: int) -> bool:
        """Whether the model has given a row no number, so that its keys and values may be none either."""
        return bool(np.isnan(self.logp[row, : self.produced[row]]).any())

    def remove(self, row: int) -> int:
        """Take a row out by moving the last one into its place; returns which row that was."""
        last = len(self.requests) - 1
        if row != last:
            self.requests[row], self.versions[row] = self.requests[last], self.versions[last]
            for column in (
                self.last_token, self.position, self.produced, self.limit, self.key, self.drawn,
                self.temperature, self.top_k, self.top_p, self.min_p, self.tokens, self.logp, self.raw_logp,
            ):  # fmt: skip
                column[row] = column[last]
        self.requests.pop()
        self.versions.pop()
        self._wants = None
        return last
