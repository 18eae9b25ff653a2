"""Causal attention on packed sequences: no sequence attends to its neighbour.

On a GPU in half types torch's variable-length flash attention runs; on a CPU a C kernel runs for sequences up to
MAX_C_ATTENTION_LENGTH (`cpu/attention.c`). Otherwise sequences of similar length are stacked with padding for one call of torch's fused
attention. The mask is causal and padding comes last, so no real token attends to padding, and no mask tensor is needed.
At most about a quarter of a stack is padding.

Where sequences share their beginnings (`shared_prefix.py`) queries, keys and values are rows of their own only, and
attention runs in pieces (`tree_attention.py`) or in the C kernel. In the other cases the stacks contain the queries of shared rows too,
and their results are dropped: short sequences without the C kernel, windows of long sequences on a CPU, and wide types on a GPU.

Soft-capped scores (Gemma 2) need a kernel of their own on a GPU (`triton/packed_attention.py`), because flash attention in torch has no
soft cap; elsewhere the scores are explicit (`softcap_attention.py`).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.architecture import Windows
from burnish.models.kernels import tree_attention as tree
from burnish.models.kernels.cpu.c_library import STORED_TYPES, c_kernels
from burnish.models.kernels.cpu.cpu_ops import MAX_C_ATTENTION_LENGTH, PackedSequences, c_attention
from burnish.models.kernels.device import use_triton
from burnish.models.kernels.shared_prefix import ComputedRows, expand_rows
from burnish.models.kernels.softcap_attention import Stack, causal_mask, softcapped_attention
from burnish.models.kernels.tree_attention import (
    CPU_KERNEL,
    CUDNN_KERNEL,
    Piece,
    dense_piece,
    gpu_pieces,
    has_cudnn_kernel,
    node_pieces,
    tree_attention,
)

EXPLICIT_SCORES_LENGTH = 256
"""On a CPU, sequences up to this length compute explicit scores."""
MIN_WINDOW_BLOCK = 512
"""Fewest queries of a block of windowed attention without a kernel for it."""
MAX_LENGTH_RATIO = 1.25
"""Longest sequence of a bucket over its shortest."""


def has_varlen_kernel(q: Tensor) -> bool:
    """Whether torch's variable-length kernel runs on these queries."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


@cache
def _gqa_option() -> dict[str, Any]:
    from torch.nn.attention.varlen import varlen_attn

    # From torch 2.12 on grouped-query attention must be requested; earlier versions apply it by themselves.
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], longest: tuple[int, int], window: int | None
) -> Tensor:
    """Causal attention of packed queries [N, heads, D] over packed keys [M, kv_heads, D], aligned at each sequence's end.

    `bounds` are the int32 offsets of the sequences among queries and keys, `longest` their maximum lengths.
    """
    reach = (-1 if window is None else window - 1, 0)
    if not torch.is_grad_enabled():
        # Call the operator directly: the torch module that adds the gradient takes one to two seconds to import.
        operation = torch.ops.aten._flash_attention_forward
        options = {"window_size_left": reach[0], "window_size_right": reach[1]}
        return cast(Tensor, operation(q, k, v, *bounds, *longest, 0.0, window is None, False, **options)[0])
    from torch.nn.attention.varlen import varlen_attn

    return cast(Tensor, varlen_attn(q, k, v, *bounds, *longest, window_size=reach, **_gqa_option()))


class PackedAttention:
    """Attention of one packing: planned once, then called by every layer as `attend(layer, q, k, v)`."""

    def __init__(
        self,
        offsets: Tensor,
        windows: Windows = None,
        rows: ComputedRows | None = None,
        softcap: float | None = None,
    ) -> None:
        self.offsets = offsets
        self.windows = windows
        self.softcap = softcap
        self.rows = rows
        self.lengths = offsets.diff().tolist()
        self.uniform = self.lengths[0] if self.lengths and min(self.lengths) == max(self.lengths) else None
        self._buckets: list[tuple[Tensor, Tensor, Tensor]] | None = [] if self.uniform else None
        self._sequences: PackedSequences | None = None
        self._pieces: dict[bool, list[Piece]] = {}
        self._stacks: list[Stack] | None = None
        self._bounds: tuple[tuple[Tensor, Tensor], tuple[int, int]] | None = None

    @property
    def buckets(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Buckets of sequences of similar length; see `_length_buckets`."""
        if self._buckets is None:
            self._buckets = _length_buckets(self.lengths, self.offsets)
        return self._buckets

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries [N, heads, D] over keys and values [N, kv_heads, D]; [U, ...] each with shared prefixes."""
        window = window_of(self.windows, layer)
        if self.softcap is not None:
            return self._softcapped(q, k, v, window, self.softcap)
        is_short = max(self.lengths, default=0) <= MAX_C_ATTENTION_LENGTH
        library = c_kernels(q, k, v, stored_in=STORED_TYPES) if is_short else None
        if library is not None:
            if self._sequences is None:
                self._sequences = PackedSequences(self.offsets, self.rows)
            return c_attention(library, q, k, v, self._sequences, window)
        if self.rows is not None:
            return self._shared(self.rows, q, k, v, window)
        return self._whole(q, k, v, window)

    def _softcapped(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float) -> Tensor:
        rows = self.rows
        if use_triton(q):
            from burnish.models.kernels.triton.packed_attention import packed_attention

            bounds, longest = self._query_and_key_bounds()
            k, v = (x if rows is None else expand_rows(x, rows) for x in (k, v))
            return packed_attention(q, k, v, bounds, longest, window, softcap)
        if self._stacks is None:
            self._stacks = self._token_stacks()
        return softcapped_attention(q, k, v, self._stacks, window, softcap)

    def _token_stacks(self) -> list[Stack]:
        """The row of each token in stacks of sequences of similar length, and whether the token is the row's own."""
        tokens = torch.arange(sum(self.lengths), device=self.offsets.device)
        if self.uniform:
            stacks = [
                (tokens.view(-1, self.uniform), tokens.new_ones(()).bool().expand(len(self.lengths), self.uniform))
            ]
        else:
            stacks = [(gather, keep) for gather, keep, _ in self.buckets]
        if self.rows is None:
            return stacks
        is_own = torch.zeros_like(tokens, dtype=torch.bool).index_fill_(0, self.rows.own, True)
        return [(self.rows.row_of[gather], keep & is_own[gather]) for gather, keep in stacks]

    def _query_and_key_bounds(self) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Offsets of the sequences among queries and among keys, and the most of each."""
        if self._bounds is None:  # once for all layers: reading the longest waits for the GPU
            keys, longest = self.offsets.int(), max(self.lengths)
            if self.rows is None:
                self._bounds = (keys, keys), (longest, longest)
            else:
                queries = self.rows.offsets
                self._bounds = (queries.int(), keys), (int(queries.diff().max()), longest)
        return self._bounds

    def _shared(self, rows: ComputedRows, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if has_varlen_kernel(q):
            if tree.PIECES_ON_GPU and window is None and has_cudnn_kernel(q):
                if True not in self._pieces:
                    self._pieces[True] = gpu_pieces(rows, self.offsets, True)
                if any(piece.is_dense for piece in self._pieces[True]):
                    return tree_attention(q, k, v, self._pieces[True], CUDNN_KERNEL)
            return varlen_attention(
                q, expand_rows(k, rows), expand_rows(v, rows), *self._query_and_key_bounds(), window
            )
        if q.device.type == "cpu" and window is None and max(self.lengths) > MAX_C_ATTENTION_LENGTH:
            if False not in self._pieces:
                self._pieces[False] = node_pieces(rows)
            return tree_attention(q, k, v, self._pieces[False], CPU_KERNEL)
        q, k, v = (expand_rows(x, rows) for x in (q, k, v))
        return self._whole(q, k, v, window).index_select(0, rows.own)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if len(self.lengths) == 1 and self.lengths[0] >= tree.MIN_DENSE_ROWS and window is None and has_cudnn_kernel(q):
            if True not in self._pieces:  # for its rounded shape: torch's own call would plan every new length
                self._pieces[True] = [dense_piece(slice(0, len(q)), slice(0, len(q)), q.device, is_causal=True)]
            return tree_attention(q, k, v, self._pieces[True], CUDNN_KERNEL)
        if self.uniform and (window is None or window >= self.uniform or not has_varlen_kernel(q)):
            shape = (-1, self.uniform)
            q, k, v = (x.reshape(*shape, *x.shape[1:]) for x in (q, k, v))
            return _causal_attention(q, k, v, window).flatten(0, 1)
        if has_varlen_kernel(q):
            bounds, longest = self.offsets.int(), max(self.lengths)
            return varlen_attention(q, k, v, (bounds, bounds), (longest, longest), window)
        out = torch.empty_like(q)
        for gather, keep, where in self.buckets:
            stacked = _causal_attention(q[gather], k[gather], v[gather], window)
            out = out.index_copy(0, where, stacked[keep])
        return out


def window_of(windows: Windows, layer: int) -> int | None:
    """The attention window of a layer; None is no limit."""
    return windows[layer] if isinstance(windows, tuple) else windows


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of stacked sequences; [b, L, H, D] in and out."""
    length = q.shape[1]
    if length <= EXPLICIT_SCORES_LENGTH and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        return _explicit_attention(q, k, v, window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    if window is None or length <= window:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    else:
        out = _windowed_attention(q, k, v, window, gqa)
    return out.transpose(1, 2)


def _windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int, gqa: bool) -> Tensor:
    """Causal attention within a window, [b, H, L, D]: blocks of queries over the keys that they see, so that no mask is [L, L]."""
    length = q.shape[2]
    size = max(window, MIN_WINDOW_BLOCK)
    if length <= size + window:
        mask = causal_mask(length, window, q.device)
        return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa)
    seen = causal_mask(size + window, window, q.device)[window:]  # the keys begin `window` before the first query
    # Added to scores: torch would turn a mask of booleans into one for every block, and save it.
    whole = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
    parts = []
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(0, start - window)
        mask = whole[: stop - start, window - (start - first) : window + stop - start]
        keys, values = k[:, :, first:stop], v[:, :, first:stop]
        parts.append(functional.scaled_dot_product_attention(q[:, :, start:stop], keys, values, mask, enable_gqa=gqa))
    return torch.cat(parts, 2)


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention by batched matmuls, which on a CPU is faster than the fused kernel for short sequences.

    The query heads that share a key head are stacked as more queries of that head, so that no key is repeated.
    """
    batch, length, heads, dim = q.shape
    shared = heads // k.shape[2]
    queries = q.view(batch, length, -1, shared, dim).permute(0, 2, 3, 1, 4).reshape(-1, shared * length, dim)
    keys, values = (x.transpose(1, 2).reshape(-1, length, dim) for x in (k, v))
    hidden = torch.zeros(length, length, dtype=q.dtype).masked_fill_(~causal_mask(length, window, q.device), -torch.inf)
    scores = torch.baddbmm(hidden.repeat(shared, 1), queries, keys.transpose(1, 2), alpha=dim**-0.5)
    out = torch.bmm(scores.softmax(-1), values)
    return out.view(batch, -1, shared, length, dim).permute(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _length_buckets(lengths: list[int], offsets: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Buckets of sequences of similar length as (token indices [b, L], is not padding [b, L], indices of real tokens)."""
    order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: lengths[i])
    buckets: list[list[int]] = []
    for i in order:
        if buckets and lengths[i] <= max(lengths[buckets[-1][0]] * MAX_LENGTH_RATIO, lengths[buckets[-1][0]] + 4):
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
