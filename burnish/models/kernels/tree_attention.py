"""Attention over a prefix tree in pieces, whose results are merged by their log-sum-exps.

Rows are in depth-first order (`shared_prefix.py`). A query attends to the rows of its own sequence up to itself, and to the rows of
its prefix. The first piece is causal: the queries of each sequence over its own rows. Every inner node of the tree is one more piece
without mask: the queries of all sequences below it, except for the one that owns the node's rows, over these rows. Both are
contiguous. No key is repeated, and each visible pair is computed once.

    lse = log(exp(lse_1) + exp(lse_2)),   out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

The backward kernels of flash attention (2307.08691) read only the output and the log-sum-exp of a query, and derive the weights of a
piece from them. Given the merged ones, they return a piece's part of the gradients, which add up (Ring Attention, 2310.01889).

On a CPU the pieces are calls of torch's fused attention. On a GPU few large calls are better than many small ones, and cuDNN's dense
attention takes about half the time of torch's variable-length flash attention on an H200. There a long sequence is a dense causal piece,
and the root of a tree is a dense piece without mask. One variable-length call computes all short sequences. It reads copies of the
prefix rows that are in no root piece.

cuDNN plans a call for 70 ms when it sees a shape for the first time, so dense pieces have rounded shapes (`rounded`). Rows of zeros follow
the queries: their results are dropped and their gradients are zero. They also follow the keys of a causal piece, which no query sees. The
keys of a root are rounded down, and one more variable-length call computes those left over. All shapes are multiples of 128: the backward
kernel of cuDNN gives the keys that are missing in its last tile of 128 the score 0, and exp(0 - lse) is infinite for queries whose scores
are all below -89 (pytorch issue 196678). Qwen2.5 has such heads, and the gradient is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from burnish.models.kernels.shared_prefix import ComputedRows

PIECES_ON_GPU = True
"""Whether a GPU computes prefix trees with long parts in pieces. The others, and all where it is off, are one call over copies of the prefixes."""

MIN_DENSE_ROWS = 1024
"""Own rows of a sequence from which on it is a dense piece of its own on a GPU."""
MIN_DENSE_PAIRS = 1024 * 1024
"""Pairs of a query and a key from which on a root is a dense piece of its own on a GPU."""
MIN_DENSE_SIDE = 128
"""Fewest queries and fewest keys of a dense root piece."""
ROUNDING = 16
"""Most shapes of dense pieces between two powers of two."""
TILE = 128
"""Dense pieces have multiples of this many queries and keys."""

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
    """Most queries and most keys of a segment. A dense piece may have fewer rows: zeros follow them."""
    is_causal: bool = False
    """Whether a segment's queries are its last rows, and do not attend to later keys."""
    is_further: bool = False
    """Whether its queries are in an earlier piece too."""
    is_dense: bool = False
    """Whether it is one large segment of contiguous rows. If causal, it has as many queries as keys."""


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
        pieces.append(Piece(queries, keys, *_bounds([[queries], [keys]]), is_further=True))
    return pieces


def gpu_pieces(rows: ComputedRows, offsets: Tensor, has_dense_kernel: bool) -> list[Piece]:
    """Dense pieces for long sequences and large roots, and one causal piece for all other sequences with copies of their prefixes.

    Without a kernel for dense pieces there is only the latter. This is also the case with an attention window, which depends on the
    distance of query and key.
    """
    starts, tokens, device = rows.offsets.tolist(), offsets.tolist(), offsets.device
    roots = tree_nodes(rows.shared, starts, max_depth=1) if has_dense_kernel else []
    roots = [(queries, keys) for queries, keys in roots if _is_large(_size(queries), _size(keys))]
    left_over = []  # (queries, keys) of the roots
    covered = np.zeros(len(rows.shared), dtype=np.int64)  # [S] prefix tokens whose keys are in pieces of a root
    for queries, keys in roots:
        covered[np.searchsorted(starts, queries.start) : np.searchsorted(starts, queries.stop)] = _size(keys)
    own = _ranges(starts)
    copied = np.asarray(rows.shared) - covered  # [S] prefix tokens whose keys are copied
    is_long = (np.diff(starts) >= MIN_DENSE_ROWS) & (copied == 0) & has_dense_kernel
    pieces = [dense_piece(own[s], own[s], device, is_causal=True) for s in np.flatnonzero(is_long)]
    if not is_long.all():
        short = np.flatnonzero(~is_long).tolist()
        visible = [slice(tokens[s] + int(covered[s]), tokens[s + 1]) for s in short]
        queries_of = _joined([own[s] for s in short], device)
        keys_of = rows.row_of[_indices(visible, device)] if copied.any() else queries_of
        bounds = _bounds([[own[s] for s in short], visible], device)
        pieces.append(Piece(queries_of, keys_of, *bounds, is_causal=True))
    for queries, keys in roots:
        middle = keys.start + rounded(_size(keys), up=False)
        pieces.append(dense_piece(queries, slice(keys.start, middle), device, is_further=True))
        left_over += [(queries, slice(middle, keys.stop))] if middle < keys.stop else []
    if left_over:
        sides = [queries for queries, _ in left_over], [keys for _, keys in left_over]
        queries_of, keys_of = (_joined(side, device) for side in sides)
        pieces.append(Piece(queries_of, keys_of, *_bounds(sides, device), is_further=True))
    return pieces


def rounded(size: int, up: bool) -> int:
    """The size, or the next one of which there are at most `ROUNDING` between two powers of two: a multiple of `TILE`."""
    step = max(2 ** (size.bit_length() - 1) // ROUNDING, TILE)
    return -(-size // step) * step if up else size // step * step


def _is_large(num_queries: int, num_keys: int) -> bool:
    return num_queries * num_keys >= MIN_DENSE_PAIRS and min(num_queries, num_keys) >= MIN_DENSE_SIDE


def dense_piece(
    queries: slice, keys: Rows, device: torch.device, is_causal: bool = False, is_further: bool = False
) -> Piece:
    """A dense piece of rounded shape. The keys of one without mask must have a rounded size already."""
    num_queries = rounded(_size(queries), up=True)
    num_keys = len(keys) if isinstance(keys, Tensor) else _size(keys)
    sides = [[slice(0, num_queries)], [slice(0, num_queries if is_causal else num_keys)]]
    return Piece(queries, keys, *_bounds(sides, device), is_causal, is_further, is_dense=True)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], kernel: PieceKernel, window: int | None = None
) -> Tensor:
    """Attention of queries [U, heads, D] over keys and values [U, kv_heads, D] in pieces; a window limits the causal ones.

    Every query is in one piece that is not further, and in any number of further ones after it.
    """
    return _TreeAttention.apply(q, k, v, pieces, kernel, window)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], kernel: PieceKernel, window: int | None
    ) -> Tensor:
        out, lse = forward_pieces(q, k, v, pieces, kernel, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = pieces, kernel, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = backward_pieces(grads[0].contiguous(), q, k, v, out, lse, *ctx.plan)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def forward_pieces(
    q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], kernel: PieceKernel, window: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, D] and log-sum-exps [n, heads] of queries [n, heads, D] over keys and values [m, kv_heads, D]."""
    out = lse = q.new_empty(0)
    for index, piece in enumerate(pieces):
        q_rows, k_rows, v_rows = _query_rows(q, piece), _key_rows(k, piece), _key_rows(v, piece)
        found = kernel.forward(q_rows, k_rows, v_rows, piece, window if piece.is_causal else None)
        found = _without_zeros(found[0], piece.queries), _without_zeros(found[1], piece.queries)
        if piece.is_further:
            _merge_rows(out, lse, *found, piece.queries)
        elif found[0].shape == q.shape:
            out, lse = found
        else:
            if index == 0:
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
                lse = found[1].new_empty(q.shape[1], q.shape[0]).t()
            _write_rows(out, found[0], piece.queries)
            _write_rows(lse, found[1], piece.queries)
    return out, lse


def backward_pieces(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pieces: Sequence[Piece], kernel: PieceKernel,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values; those of keys and values are sums in float32 or wider."""
    # Summed in float32, because a bfloat16 sum would be rounded once for every piece. A sum of two is rounded once anyway.
    wide = torch.promote_types(q.dtype, torch.float32)
    total_k, total_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    is_sum_of_two = all(piece.is_dense for piece in pieces if piece.is_further)
    total_q = torch.empty(q.shape, dtype=q.dtype if is_sum_of_two else wide, device=q.device)
    for piece in pieces:
        grad_rows, q_rows, out_rows, lse_rows = (_query_rows(x, piece) for x in (grad, q, out, lse))
        keys, reach = (_key_rows(k, piece), _key_rows(v, piece)), window if piece.is_causal else None
        part_q, part_k, part_v = kernel.backward(grad_rows, q_rows, *keys, out_rows, lse_rows, piece, reach)
        part_q = _without_zeros(part_q, piece.queries)
        part_k, part_v = _without_zeros(part_k, piece.keys), _without_zeros(part_v, piece.keys)
        if piece.is_further:
            _add_rows(total_q, part_q, piece.queries)
        elif part_q.shape == total_q.shape and total_q.dtype == part_q.dtype:
            total_q = part_q
        else:
            _write_rows(total_q, part_q, piece.queries)
        _add_rows(total_k, part_k, piece.keys)
        _add_rows(total_v, part_v, piece.keys)
    return total_q, total_k, total_v


def _merge_rows(out: Tensor, lse: Tensor, further: Tensor, further_lse: Tensor, rows: Rows) -> None:
    """Merge the results of one more piece into rows of the output and of the log-sum-exp."""
    before, before_lse = out[rows], lse[rows]
    both = torch.logaddexp(before_lse, further_lse)
    merged = before * (before_lse - both).exp()[..., None] + further * (further_lse - both).exp()[..., None]
    _write_rows(out, merged, rows)
    _write_rows(lse, both, rows)


def _query_rows(x: Tensor, piece: Piece) -> Tensor:
    """The rows of a piece's queries, with zeros after those of a dense one."""
    rows = _select(x, piece.queries)
    return _with_zeros(rows, piece.longest[0]) if piece.is_dense else rows


def _key_rows(x: Tensor, piece: Piece) -> Tensor:
    rows = _select(x, piece.keys)
    return _with_zeros(rows, piece.longest[1]) if piece.is_dense else rows


def _with_zeros(x: Tensor, size: int) -> Tensor:
    if len(x) == size:
        return x
    longer = x.new_zeros(size, *x.shape[1:])
    longer[: len(x)] = x
    return longer


def _without_zeros(x: Tensor, rows: Rows) -> Tensor:
    """The rows without those that a dense piece added."""
    if isinstance(rows, Tensor) or rows == slice(None):
        return x
    return x[: _size(rows)]


def _select(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _write_rows(x: Tensor, part: Tensor, rows: Rows) -> None:
    if isinstance(rows, slice):
        x[rows] = part
    else:
        x.index_copy_(0, rows, part.to(x.dtype))


def _add_rows(total: Tensor, part: Tensor, rows: Rows) -> None:
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def _ranges(starts: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def _size(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _joined(ranges: Sequence[slice], device: torch.device) -> Rows:
    """One range if the given ones follow each other, otherwise indices."""
    if all(a.stop == b.start for a, b in zip(ranges, ranges[1:], strict=False)):
        return slice(ranges[0].start, ranges[-1].stop)
    return _indices(ranges, device)


def _indices(ranges: Sequence[slice], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([np.arange(part.start, part.stop) for part in ranges])).to(device)


def _bounds(
    sides: Sequence[Sequence[slice]], device: torch.device | None = None
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Offsets of the segments among queries and among keys, and the most of each."""
    sizes = [[_size(part) for part in side] for side in sides]
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
        return found[0], found[1].t()

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


class CudnnKernel:
    """cuDNN's attention on a GPU for dense pieces, and flash attention for the others.

    Its variable-length form is far slower than flash attention. Its causal mask is aligned at the beginning.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, window: int | None) -> tuple[Tensor, Tensor]:
        if not piece.is_dense:
            return FLASH_KERNEL.forward(q, k, v, piece, window)
        views = (_by_head(x) for x in (q, k, v))
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(*views, None, True, 0.0, piece.is_causal, False)
        return found[0][0].transpose(0, 1), found[1].view(q.shape[1], q.shape[0]).t()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not piece.is_dense:
            return FLASH_KERNEL.backward(grad, q, k, v, out, lse, piece, window)
        views = (_by_head(x) for x in (grad, q, k, v, out))
        state = torch.empty((), dtype=torch.long, device=q.device)  # without dropout the random state is not read
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *views, lse.t().contiguous()[None, :, :, None], state, state, None, None, None, *piece.longest, 0.0, piece.is_causal
        )  # fmt: skip
        grad_q, grad_k, grad_v = (x[0].transpose(0, 1) for x in found)
        return grad_q, grad_k, grad_v


def has_cudnn_kernel(q: Tensor) -> bool:
    """Whether cuDNN computes dense pieces of these queries [n, heads, D], and is faster than flash attention there."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and torch.backends.cudnn.is_available()
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
    )


def _by_head(x: Tensor) -> Tensor:
    """A view [1, heads, n, D] of rows [n, heads, D]."""
    return x.transpose(0, 1)[None]


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


class ExplicitKernel:
    """Matmuls with all scores of a segment in memory: for windows on a CPU, and for wide types on a GPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, window: int | None) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        for queries, keys in _segments(piece):
            query, key, value = _by_key_head(q[queries], k[keys], v[keys])
            scores = _visible_scores(query, key, piece, window)
            lse[queries] = scores.logsumexp(-1).flatten(0, 1).t()
            out[queries] = _by_row(scores.softmax(-1) @ value)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = tuple(x.new_empty(x.shape) for x in (q, k, v))
        for queries, keys in _segments(piece):
            query, key, value = _by_key_head(q[queries], k[keys], v[keys])
            grad_view, out_view = (_split_heads(x[queries], k.shape[1]) for x in (grad, out))
            lse_view = lse[queries].t().unflatten(0, (k.shape[1], -1))
            weights = (_visible_scores(query, key, piece, window) - lse_view[..., None]).exp()
            mean = (grad_view * out_view).sum(-1, keepdim=True)
            grad_scores = weights * (grad_view @ value.transpose(-1, -2) - mean) * q.shape[-1] ** -0.5
            found[0][queries] = _by_row(grad_scores @ key)
            found[1][keys] = (grad_scores.transpose(-1, -2) @ query).sum(1).transpose(0, 1)
            found[2][keys] = (weights.transpose(-1, -2) @ grad_view).sum(1).transpose(0, 1)
        return found[0], found[1], found[2]


def _visible_scores(query: Tensor, key: Tensor, piece: Piece, window: int | None) -> Tensor:
    """Scores [kv_heads, query heads per key head, queries, keys], minus infinity where a query does not see a key."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if not piece.is_causal:
        return scores
    num_queries, num_keys = scores.shape[-2:]
    # The last query is at the last key.
    sees = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device).tril(num_keys - num_queries)
    if window is not None:
        sees &= ~sees.tril(num_keys - num_queries - window)
    return scores.masked_fill(~sees, -torch.inf)


CPU_KERNEL, FLASH_KERNEL, CUDNN_KERNEL, EXPLICIT_KERNEL = CpuKernel(), FlashKernel(), CudnnKernel(), ExplicitKernel()
