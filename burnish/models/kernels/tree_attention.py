"""Attention over a prefix tree in pieces, whose results are merged by their log-sum-exps.

Rows are in depth-first order (`shared_prefix.py`). A query attends to the rows of its own sequence up to itself, and to the rows of
its prefix. The first piece is causal: the queries of each sequence over its own rows. Every inner node of the tree is one more piece
without mask: the queries of all sequences below it, except for the one that owns the node's rows, over these rows. Both are
contiguous. No key is repeated, and each visible pair is computed once.

    lse = log(exp(lse_1) + exp(lse_2)),   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

The backward kernels of flash attention (2307.08691) read only the output and the log-sum-exp of a query, and derive the weights of a
piece from them. Given the merged ones, they return a piece's part of the gradients, which add up (Ring Attention, 2310.01889).

On a CPU the pieces are calls of torch's fused attention. On a GPU few large calls are better than many small ones. There only the root
of a tree can be a piece of its own, for all trees in one call. The causal piece reads copies of the other prefix rows. Pieces on a GPU are
off (`PIECES_ON_GPU`): one call over copies of all prefix rows computes the same and takes about as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from burnish.models.kernels.shared_prefix import ComputedRows

MIN_KEYS_SAVED = 4
"""Copied keys that a root piece must save for each of its queries on a GPU. An estimate from the bytes that both ways move."""

PIECES_ON_GPU = False
"""Whether a GPU computes prefix trees in pieces. With prompts of 8,192 tokens they saved 3% on an H200; short prompts were not timed."""

Rows = slice | Tensor
"""Rows of a packing: a range, or indices."""


@dataclass(frozen=True)
class Piece:
    """Queries of some rows over keys of some rows: one or several segments, which do not see each other."""

    queries: Rows
    keys: Rows
    query_bounds: Tensor  # [segments + 1], int32
    key_bounds: Tensor  # [segments + 1], int32
    longest: tuple[int, int]
    """Most queries and most keys of a segment."""
    is_causal: bool = False
    """Whether a segment's queries are its last rows, and do not attend to later keys."""


class PieceKernel(Protocol):
    """Attention of one piece, given the rows of its queries [n, heads, D] and keys [m, kv_heads, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, window: int | None) -> tuple[Tensor, Tensor]:
        """The output [n, heads, D], and the log-sum-exp of the scores [n, heads]."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, given the merged output and log-sum-exp of the queries."""


def tree_nodes(shared: Sequence[int], starts: Sequence[int], max_depth: int | None = None) -> list[tuple[slice, slice]]:
    """The inner nodes of the prefix trees, as (rows of the queries below a node, rows of the node).

    Sequence s shares `shared[s]` tokens with the one before it, and its own rows begin at `starts[s]`. The queries of the sequence
    that owns a node's rows are left out.
    """
    counts = np.asarray(shared)
    roots = [*np.flatnonzero(counts == 0).tolist(), len(counts)]
    waiting = [(first, last, 0, 0) for first, last in zip(roots, roots[1:], strict=False)]
    found = []
    while waiting:
        first, last, begin, depth = waiting.pop()
        if last - first < 2 or depth == max_depth:
            continue
        # The tokens [begin, end) of `first` are those of all sequences before `last`.
        end = int(counts[first + 1 : last].min())
        key = starts[first] - int(counts[first])
        found.append((slice(starts[first + 1], starts[last]), slice(key + begin, key + end)))
        children = [first, *(first + 1 + np.flatnonzero(counts[first + 1 : last] == end)).tolist(), last]
        waiting += [(a, b, end, depth + 1) for a, b in zip(children, children[1:], strict=False)]
    return found


def node_pieces(rows: ComputedRows) -> list[Piece]:
    """A causal piece over each sequence's own rows, and a piece for every inner node."""
    starts = rows.offsets.tolist()
    pieces = [Piece(slice(None), slice(None), *_bounds([_ranges(starts)] * 2), is_causal=True)]
    for queries, keys in tree_nodes(rows.shared, starts):
        pieces.append(Piece(queries, keys, *_bounds([[queries], [keys]])))
    return pieces


def root_pieces(rows: ComputedRows, offsets: Tensor, has_window: bool) -> list[Piece]:
    """A causal piece over each sequence's whole past, and a piece for the roots if it saves enough copies of keys.

    With an attention window there is no piece for the roots, because the window depends on the distance of query and key.
    """
    starts, tokens, device = rows.offsets.tolist(), offsets.tolist(), offsets.device
    roots = [] if has_window else tree_nodes(rows.shared, starts, max_depth=1)
    covered = np.zeros(len(rows.shared), dtype=np.int64)  # [S] prefix tokens whose keys are in a root piece
    for queries, keys in roots:
        below = slice(np.searchsorted(starts, queries.start), np.searchsorted(starts, queries.stop))
        covered[below] = keys.stop - keys.start
    if covered.sum() <= MIN_KEYS_SAVED * sum(queries.stop - queries.start for queries, _ in roots):
        roots, covered = [], np.zeros_like(covered)
    lengths = np.diff(tokens) - covered
    ends = lengths.cumsum()
    if not (np.asarray(rows.shared) - covered).any():
        keys_of_all: Rows = slice(None)
    else:
        visible = [slice(a + skipped, b) for a, b, skipped in zip(tokens, tokens[1:], covered.tolist(), strict=False)]
        keys_of_all = rows.row_of[_indices(visible, device)]
    bounds = _bounds([_ranges(starts), _ranges([0, *ends.tolist()])], device)
    pieces = [Piece(slice(None), keys_of_all, *bounds, is_causal=True)]
    if roots:
        queries_of, keys_of = [queries for queries, _ in roots], [keys for _, keys in roots]
        bounds = _bounds([queries_of, keys_of], device)
        pieces.append(Piece(_indices(queries_of, device), _indices(keys_of, device), *bounds))
    return pieces


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], kernel: PieceKernel, window: int | None = None
) -> Tensor:
    """Attention of queries [U, heads, D] over keys and values [U, kv_heads, D] in pieces. The first piece has all queries."""
    return _TreeAttention.apply(q, k, v, pieces, kernel, window)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], kernel: PieceKernel, window: int | None
    ) -> Tensor:
        out, lse = kernel.forward(q, _select(k, pieces[0].keys), _select(v, pieces[0].keys), pieces[0], window)
        for piece in pieces[1:]:
            keys = _select(k, piece.keys), _select(v, piece.keys)
            further, further_lse = kernel.forward(_select(q, piece.queries), *keys, piece, None)
            before, before_lse = out[piece.queries], lse[piece.queries]
            both = torch.logaddexp(before_lse, further_lse)
            merged = before * (before_lse - both).exp()[..., None] + further * (further_lse - both).exp()[..., None]
            out[piece.queries], lse[piece.queries] = merged.to(out.dtype), both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = pieces, kernel, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        pieces, kernel, window = ctx.plan
        grad = grads[0].contiguous()
        # Summed in float32, because a bfloat16 sum would be rounded once for every piece.
        wide = torch.promote_types(q.dtype, torch.float32)
        sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
        for index, piece in enumerate(pieces):
            grad_rows, q_rows, out_rows, lse_rows = (_select(x, piece.queries) for x in (grad, q, out, lse))
            keys = _select(k, piece.keys), _select(v, piece.keys)
            found = kernel.backward(grad_rows, q_rows, *keys, out_rows, lse_rows, piece, window if index == 0 else None)
            for total, part, rows in zip(sums, found, (piece.queries, piece.keys, piece.keys), strict=True):
                _add_rows(total, part, rows)
        return *(total.to(q.dtype) for total in sums), None, None, None


def _select(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _add_rows(total: Tensor, part: Tensor, rows: Rows) -> None:
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def _ranges(starts: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def _indices(ranges: Sequence[slice], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([np.arange(part.start, part.stop) for part in ranges])).to(device)


def _bounds(
    sides: Sequence[Sequence[slice]], device: torch.device | None = None
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Offsets of the segments among queries and among keys, and the most of each."""
    sizes = [[part.stop - part.start for part in side] for side in sides]
    queries, keys = (torch.tensor([0, *np.cumsum(side)], dtype=torch.int32, device=device) for side in sizes)
    return queries, keys, (max(sizes[0]), max(sizes[1]))


# --- kernels -----------------------------------------------------------------------------------------------------------


class FlashKernel:
    """torch's variable-length flash attention on a GPU. Its causal mask is aligned at the end of a segment."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, window: int | None) -> tuple[Tensor, Tensor]:
        left, right = _reach(piece, window)
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, piece.query_bounds, piece.key_bounds, *piece.longest, 0.0, piece.is_causal and window is None, False,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return found[0], found[1].t().contiguous()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = _reach(piece, window)
        # Without dropout the random state is not read.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse.t().contiguous(), piece.query_bounds, piece.key_bounds, *piece.longest, 0.0,
            piece.is_causal and window is None, state, unused, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return found[0], found[1], found[2]


def _reach(piece: Piece, window: int | None) -> tuple[int, int]:
    """How far a query sees to the left and to the right; -1 is no limit."""
    if not piece.is_causal:
        return -1, -1
    return (-1 if window is None else window - 1), 0


class CpuKernel:
    """torch's fused attention on a CPU, segment by segment. A causal segment must have as many queries as keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, window: int | None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)
        for queries, keys in _segments(piece):
            views = _by_key_head(q[queries], k[keys], v[keys])
            found, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*views, 0.0, piece.is_causal)
            out[queries], lse[queries] = _by_row(found), found_lse.flatten(0, 1).t()
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = tuple(x.new_empty(x.shape) for x in (q, k, v))
        for queries, keys in _segments(piece):
            views = _by_key_head(q[queries], k[keys], v[keys])
            grad_view, out_view = (_split_heads(x[queries], k.shape[1]) for x in (grad, out))
            lse_view = lse[queries].t().unflatten(0, (k.shape[1], -1)).contiguous()
            grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_view, *views, out_view, lse_view, 0.0, piece.is_causal
            )
            # A key's gradient is the sum over the query heads that read it.
            found[0][queries] = _by_row(grad_q)
            found[1][keys], found[2][keys] = (x.sum(1).transpose(0, 1) for x in (grad_k, grad_v))
        return found[0], found[1], found[2]


def _segments(piece: Piece) -> list[tuple[slice, slice]]:
    return list(zip(_ranges(piece.query_bounds.tolist()), _ranges(piece.key_bounds.tolist()), strict=True))


def _by_key_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [kv_heads, query heads per key head, rows, D]; no key is copied."""
    query = _split_heads(q, k.shape[1])
    key, value = (x.transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1) for x in (k, v))
    return query, key, value


def _split_heads(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _by_row(x: Tensor) -> Tensor:
    """[kv_heads, query heads per key head, rows, D] to [rows, heads, D]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


CPU_KERNEL, FLASH_KERNEL = CpuKernel(), FlashKernel()
