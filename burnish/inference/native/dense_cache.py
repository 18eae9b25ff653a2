"""Dense KV cache and row state of the dense engine: one row for each running sequence.

Rows 0..n-1 are always the running ones. When a sequence ends, the last row moves into its place, so every decode step works on
plain slices and never on finished sequences. Capacity along time doubles as the present sequences grow; it does not start at
the longest they may become.

Keys are stored with time last. The product of a few queries with keys in this layout takes two thirds of the time that their
transpose takes, and half for some hundred tokens.
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
from burnish.models.kernels.attention import window_of
from burnish.models.kernels.logprob import softcapped
from burnish.models.kernels.shared_prefix import Attend

CAPACITY_MULTIPLE = 16
"""A capacity is an odd multiple of this. Rows a power of two apart would fall into the same few sets of a processor's cache."""


class DenseKVCache:
    """Keys [layers, rows, kv_heads, head_dim, capacity] and values [layers, rows, kv_heads, capacity, head_dim] of all rows."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.rows, self.capacity = 0, 0
        self.keys, self.values = self._empty(0, 0)

    def _empty(self, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
        arch = self.arch
        # Zeros, not empty: masked values must be finite, since 0 * NaN is NaN.
        zeros = torch.zeros(
            2, arch.num_layers, rows, arch.num_kv_heads, capacity * arch.head_dim, dtype=self.dtype, device=self.device
        )
        return zeros[0].unflatten(-1, (arch.head_dim, capacity)), zeros[1].unflatten(-1, (capacity, arch.head_dim))

    def reserve(self, rows: int, length: int, running: int = 0) -> None:
        """Make room for `rows` rows of `length` tokens. The first `running` rows keep their content.

        A new cache has the rows needed now, not the most there ever were: many earlier rows at the present length may not fit into
        memory.
        """
        if rows <= self.rows and length <= self.capacity:
            return
        if not running:
            self.release()  # free the old memory first
        old = self.capacity
        capacity = old if length <= old else _odd_multiple(max(64, length, 2 * old))
        keys, values = self._empty(rows, capacity)
        keys[:, :running, :, :, :old] = self.keys[:, :running]
        values[:, :running, :, :old] = self.values[:, :running]
        self.keys, self.values, self.rows, self.capacity = keys, values, rows, capacity

    def clear(self, row: int) -> None:
        """Set a row to zero: masked values must be finite."""
        self.keys[:, row] = 0
        self.values[:, row] = 0

    def release(self) -> None:
        """Free the memory."""
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
    """Packed attention that records keys and values for the cache."""

    def __init__(self, packed: Attend, num_layers: int) -> None:
        self.packed = packed
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer], self.values[layer] = k, v
        return self.packed(layer, q, k, v)


class DenseDecodeAttention:
    """Attention of one query for each row to its cached past, after its own key and value are appended.

    The query heads that share a key head become several queries of that head, so no key is repeated. In float32 and float64 the
    scores are explicit, which is faster for a few queries than the fused kernel. In half precision the fused kernel keeps them in
    float32. Indices and masks are computed once for all layers.
    """

    def __init__(self, cache: DenseKVCache, positions: Tensor, longest: int, shortest: int) -> None:
        arch, rows, width = cache.arch, positions.shape[0], longest + 1
        self.dtype, self.num_kv_heads, self.windows = cache.dtype, arch.num_kv_heads, arch.windows
        self.softcap = arch.score_softcap
        heads = torch.arange(rows * arch.num_kv_heads, device=positions.device).view(rows, -1, 1)
        dims = torch.arange(0, arch.head_dim * cache.capacity, cache.capacity, device=positions.device)
        first = heads * cache.capacity + positions[:, None, None]  # for a head of width 1
        self.value_slots = first.view(-1)
        self.key_slots = (heads * (cache.capacity * arch.head_dim) + positions[:, None, None] + dims).view(-1)
        self.key_stores = cache.keys.flatten(1).unbind()
        self.value_stores = cache.values.flatten(1, 3).unbind()
        stop = rows * arch.num_kv_heads
        self.keys = cache.keys.flatten(1, 2)[:, :stop, :, :width].unbind()
        self.values = cache.values.flatten(1, 2)[:, :stop, :width].unbind()
        self.scale = arch.head_dim**-0.5
        kinds = set(self.windows) if isinstance(self.windows, tuple) else {self.windows}
        self.masks = {window: self._mask(positions, longest, shortest, window) for window in kinds}

    def _mask(self, positions: Tensor, longest: int, shortest: int, window: int | None) -> Tensor | None:
        """Mask [rows * kv_heads, 1, width] with -inf where a query must not attend; None if nothing is masked."""
        if shortest == longest and (window is None or longest < window):
            return None
        column = torch.arange(longest + 1, device=positions.device)
        is_masked = column > positions[:, None]
        if window is not None:
            is_masked |= column <= positions[:, None] - window
        bias = torch.zeros(is_masked.shape, dtype=self.dtype, device=positions.device)
        return bias.masked_fill_(is_masked, -torch.inf).repeat_interleave(self.num_kv_heads, 0)[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dim = q.shape[-1]
        self.key_stores[layer].put_(self.key_slots, k)
        self.value_stores[layer].index_copy_(0, self.value_slots, v.reshape(-1, dim))
        queries, keys, values = q.reshape(self.values[layer].shape[0], -1, dim), self.keys[layer], self.values[layer]
        mask = self.masks[window_of(self.windows, layer)]
        if self.softcap is not None:
            scores = softcapped(torch.bmm(queries, keys) * self.scale, self.softcap)
            out = torch.bmm((scores if mask is None else scores + mask).softmax(-1), values)
        elif self.dtype in (torch.float32, torch.float64):
            shape = (*queries.shape[:2], keys.shape[2])
            # With beta=0 baddbmm does not read its first argument.
            bias, beta = (queries.new_empty(1).expand(shape), 0) if mask is None else (mask, 1)
            scores = torch.baddbmm(bias, queries, keys, beta=beta, alpha=self.scale)
            out = torch.bmm(scores.softmax(-1), values)
        else:
            out = functional.scaled_dot_product_attention(queries, keys.transpose(1, 2), values, mask)
        return out.view(q.shape)


class OptionsInUse(NamedTuple):
    """Sampling options that any of the rows uses."""

    temperature: bool
    top_k: bool
    top_p: bool
    min_p: bool
    bias: bool
    raw_logprobs: bool
    stops: bool
    """Stop tokens or stop strings."""
    shared_stops: tuple[int, ...] | None
    """The stop tokens of every row; None if rows have different ones, or if one has stop strings."""

    @property
    def only_temperature(self) -> bool:
        """Whether tokens are drawn from all of the distribution, and only their log-probs under it are wanted."""
        return not (self.top_k or self.top_p or self.min_p or self.bias or self.raw_logprobs)


class RunningRows:
    """State of up to `size` running requests, as arrays. Row i of every array belongs to `requests[i]`.

    The columns are numpy arrays, which are faster than tensors for a hundred numbers. Those that the model reads are also tensors
    on the same memory.
    """

    def __init__(self, size: int) -> None:
        self.requests: list[Request] = []
        self.versions: list[int] = []
        self.last_token = np.zeros(size, dtype=np.int64)
        self.position = np.zeros(size, dtype=np.int64)  # position of the last token in its sequence
        self.produced = np.zeros(size, dtype=np.int64)
        self.limit = np.zeros(size, dtype=np.int64)
        self.key = np.zeros(size, dtype=np.int64)
        self.drawn = np.zeros(size, dtype=np.int64)  # tokens drawn for this sample, also by earlier requests
        self.temperature = np.zeros(size, dtype=np.float64)
        self.top_k = np.zeros(size, dtype=np.int64)
        self.top_p = np.zeros(size, dtype=np.float64)
        self.min_p = np.zeros(size, dtype=np.float64)
        self.rotation_delta = np.zeros(size, dtype=np.int64)  # rotation position minus position
        self.tokens = np.zeros((size, 0), dtype=np.int64)
        self.logp = np.zeros((size, 0), dtype=np.float32)
        self.raw_logp = np.zeros((size, 0), dtype=np.float32)  # of rows whose requests ask for it
        self.index = np.arange(size)
        self.tokens_in, self.positions = torch.from_numpy(self.last_token), torch.from_numpy(self.position)
        self._in_use: OptionsInUse | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def options_in_use(self) -> OptionsInUse:
        """The options that any row uses; cached until the rows change."""
        if self._in_use is None:
            options = {id(request.sampling): request.sampling for request in self.requests}.values()
            stops = {tuple(o.stop_tokens) for o in options}
            self._in_use = OptionsInUse(
                any(o.temperature != 1 for o in options),
                any(o.top_k for o in options),
                any(o.top_p < 1 for o in options),
                any(o.min_p > 0 for o in options),
                any(o.logit_bias for o in options),
                any(o.raw_logprobs for o in options),
                any(o.stop_tokens or o.stop for o in options),
                stops.pop() if len(stops) == 1 and not any(o.stop for o in options) else None,
            )
        return self._in_use

    def add(self, request: Request, version: int, rotation_delta: int = 0) -> int:
        """Append a row whose prompt is in the cache and whose first token is not drawn yet."""
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
        self.rotation_delta[i] = rotation_delta
        self._in_use = None
        return i

    def rotation(self, rows: int) -> Tensor:
        """Rotation positions of the last tokens of the first rows."""
        return torch.from_numpy(self.position[:rows] + self.rotation_delta[:rows])

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

    def record_many(self, tokens: np.ndarray, logp: np.ndarray, counts: np.ndarray) -> None:
        """Append to every row the first `counts` of its drawn tokens."""
        rows = counts.shape[0]
        longest = int((self.produced[:rows] + counts).max())
        if longest > self.tokens.shape[1]:
            self._grow(max(64, 2 * self.tokens.shape[1], longest))
        row, at = (np.arange(tokens.shape[1]) < counts[:, None]).nonzero()
        column = self.produced[row] + at
        self.tokens[row, column] = tokens[row, at]
        self.logp[row, column] = logp[row, at]
        self.last_token[:rows] = tokens[self.index[:rows], counts - 1]
        for count in (self.position, self.produced, self.drawn):
            count[:rows] += counts

    def _grow(self, capacity: int) -> None:
        for name in ("tokens", "logp", "raw_logp"):
            old = getattr(self, name)
            setattr(self, name, np.pad(old, ((0, 0), (0, capacity - old.shape[1]))))

    def completion(self, row: int, finish: str) -> Completion:
        """The tokens of a row as a completion."""
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
        """Whether a row has NaN log-probs, and so perhaps NaN keys and values."""
        return bool(np.isnan(self.logp[row, : self.produced[row]]).any())

    def remove(self, row: int) -> int:
        """Remove a row by moving the last one into its place; return the index of the last one."""
        last = len(self.requests) - 1
        if row != last:
            self.requests[row], self.versions[row] = self.requests[last], self.versions[last]
            for column in (
                self.last_token, self.position, self.produced, self.limit, self.key, self.drawn,
                self.temperature, self.top_k, self.top_p, self.min_p, self.rotation_delta, self.tokens, self.logp, self.raw_logp,
            ):  # fmt: skip
                column[row] = column[last]
        self.requests.pop()
        self.versions.pop()
        self._in_use = None
        return last
