"""Context parallelism: the ranks of a group divide the rows of the same micro-batch, and each attends over all keys.

`apply_context_parallel` chooses between two ways. Where the ranks divide the key/value heads, it is Ulysses (`sequence_parallel.py`):
attention runs on whole sequences, and the backward pass sends as little as the forward pass. Otherwise, and so with more ranks than
key/value heads, keys are gathered, as Llama 3 does it (2407.21783, section 3.3.2). This file has that way:

Each rank computes its rows with all heads. Before attention the keys and values of all ranks are gathered. The backward pass gathers
them again, and sends the gradient of each to the rank that computed it. A ring that passes keys on (Ring Attention, 2310.01889) would
hold fewer of them at a time, but it splits attention into as many calls as there are ranks, with a mask of its own for each pair of
chunks. With grouped queries the keys and values of one layer are small, and they are in memory only while that layer attends.

Causal attention costs a query more, the later it is in its sequence. A long sequence is therefore cut into 2 R chunks for R ranks, and
rank r has the r-th chunk from the beginning and the r-th from the end, which together cost the same for all r. Short sequences stay
whole. A shared prefix is computed once by all ranks together: a chunk attends to the keys of its prefix, wherever they were computed.

Labels and outputs are as in `sequence_parallel.py`: every rank sees the whole loss, and parameter gradients are sums over the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.models.architecture import Architecture, Windows
from burnish.models.decoder import Decoder, Layer
from burnish.models.kernels import tree_attention as tree
from burnish.models.kernels.attention import has_varlen_kernel, window_of
from burnish.models.kernels.shared_prefix import Attend, ComputedRows
from burnish.models.kernels.tree_attention import Piece, PieceKernel, backward_pieces, dense_piece, forward_pieces
from burnish.training.packing import ATTENTION_COST
from burnish.training.parallel.collectives import all_gather_rows, reduce_scatter_rows
from burnish.training.parallel.fsdp import backbone_of
from burnish.training.parallel.sequence_parallel import GatheredOutputs, apply_sequence_parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_WHOLE = 1 / 8
"""A sequence with more than this part of the rows of a rank is cut."""

Index = npt.NDArray[np.int64]


def apply_context_parallel(model: nn.Module, group: ProcessGroup, policy_kv_heads: int | None = None) -> None:
    """Make a model compute only this rank's rows of each micro-batch. Call it after tensor parallelism, which divides heads too.

    A model whose distributions are compared with a policy's must compute the same rows. `policy_kv_heads` are the policy's key/value heads on
    one tensor-parallel rank.
    """
    backbone = backbone_of(model)
    if not isinstance(backbone, Decoder):
        raise UserError("parallel.context needs the native decoder; this model runs through transformers")
    kv_heads = cast(Layer, backbone.layers[0]).arch.num_kv_heads
    is_exchanged = kv_heads % group.size() == 0
    if policy_kv_heads is not None and policy_kv_heads % group.size() == 0 and not is_exchanged:
        raise UserError(
            f"parallel.context={group.size()} divides the policy's {policy_kv_heads} key/value heads (of one tensor-parallel rank), but not the "
            f"{kv_heads} of the reference, so that they would compute different rows: use a divisor of both"
        )
    if is_exchanged and (policy_kv_heads is None or policy_kv_heads % group.size() == 0):
        apply_sequence_parallel(backbone, group)
        return
    check_keys_gathered(backbone.arch, kv_heads, group.size())
    windows = backbone.arch.windows
    backbone.shard_rows = lambda lengths, rows, wanted: ContextShard(group, lengths, rows, wanted, windows)


def check_keys_gathered(arch: Architecture, kv_heads: int, num_ranks: int) -> None:
    """Refuse an architecture whose attention must exchange heads. `kv_heads` are the key/value heads on one tensor-parallel rank."""
    if arch.score_softcap is not None:
        raise UserError(
            f"parallel.context={num_ranks} does not divide the {kv_heads} key/value heads (of one tensor-parallel rank), and attention over "
            "gathered keys has no soft-capped scores: use a divisor of them"
        )
    if arch.attends_both_ways:
        raise UserError(
            f"parallel.context={num_ranks} does not divide the {kv_heads} key/value heads (of one tensor-parallel rank), and attention over "
            "gathered keys is causal, also for the tokens of a picture, which attend to each other in this model: use a divisor of them"
        )


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one sequence: the tokens from `begin` to `end` of sequence `sequence`."""

    sequence: int
    begin: int
    end: int


def divide_rows(lengths: Sequence[int], shared: Sequence[int], num_ranks: int) -> list[list[Chunk]]:
    """The chunks of each rank: every token once, except for the first `shared[s]` of sequence s; about equal work.

    It depends on the lengths alone, so that a reference of another shape has the same rows as the policy.
    """
    own = [length - skipped for length, skipped in zip(lengths, shared, strict=True)]
    limit = MAX_WHOLE * sum(own) / num_ranks
    chunks: list[list[Chunk]] = [[] for _ in range(num_ranks)]
    costs = np.zeros(num_ranks)

    def give(rank: int, chunk: Chunk) -> None:
        if chunk.end > chunk.begin:
            chunks[rank].append(chunk)
            num_pairs = (chunk.end - chunk.begin) * (chunk.begin + chunk.end + 1) / 2
            costs[rank] += chunk.end - chunk.begin + 2 * ATTENTION_COST * num_pairs

    # The longest first: what is left over of a balance by long sequences is then made up for by short ones.
    for s in sorted(range(len(own)), key=lambda s: -own[s]):
        if own[s] <= limit:
            give(int(costs.argmin()), Chunk(s, shared[s], lengths[s]))
            continue
        cuts = [shared[s] + own[s] * j // (2 * num_ranks) for j in range(2 * num_ranks + 1)]
        ends = [(Chunk(s, *cuts[j : j + 2]), Chunk(s, *cuts[-j - 2 : len(cuts) - j])) for j in range(num_ranks)]
        # Chunks differ by one row, so the larger ones go to the ranks with less to do.
        ends.sort(key=lambda pair: sum(chunk.begin - chunk.end for chunk in pair))
        for rank, pair in zip(costs.argsort(kind="stable").tolist(), ends, strict=True):
            for chunk in pair:
                give(rank, chunk)
    return [sorted(of_rank, key=lambda chunk: (chunk.sequence, chunk.begin)) for of_rank in chunks]


class ContextShard(GatheredOutputs):
    """This rank's chunks of a micro-batch. All ranks have `each` rows; the last ones of some are padding."""

    def __init__(
        self, group: ProcessGroup, lengths: Sequence[int], rows: ComputedRows | None, wanted: Tensor, windows: Windows
    ) -> None:
        device, self.windows = wanted.device, windows
        shared = [0] * len(lengths) if rows is None else list(rows.shared)
        starts = np.cumsum([0, *lengths])
        row_of = np.arange(starts[-1]) if rows is None else rows.row_of.cpu().numpy()
        divided = divide_rows(lengths, shared, group.size())
        rows_of = [
            _joined(row_of[starts[c.sequence] + c.begin : starts[c.sequence] + c.end] for c in of) for of in divided
        ]
        self.num_rows, self.each = len(rows_of[group.rank()]), max(map(len, rows_of))
        place = np.empty(sum(map(len, rows_of)), dtype=np.int64)  # [U] where each row is after the gather
        for rank, index in enumerate(rows_of):
            place[index] = rank * self.each + np.arange(len(index))
        self.chunks = divided[group.rank()]
        self.key_places = [place[row_of[starts[c.sequence] : starts[c.sequence] + c.end]] for c in self.chunks]
        """The places of each chunk's keys: all tokens of its sequence up to the chunk's end."""
        self.own = torch.from_numpy(rows_of[group.rank()]).to(device)
        self._plans: dict[tuple[str, int | None], list[Piece]] = {}
        wanted_place = torch.from_numpy(place).to(device)[wanted]
        super().__init__(group, wanted_place // self.each, wanted_place % self.each)

    def rows(self, column: Tensor) -> Tensor:
        """[U] to [each]: this rank's rows of a column, with zeros behind them."""
        padded = column.new_zeros(self.each, *column.shape[1:])
        padded[: self.num_rows] = column[self.own]
        return padded

    def attention(self, attend: Attend) -> Attend:
        """Attention of this rank's rows over the keys and values of all ranks. The plan for all rows, `attend`, is not needed."""

        def gathered(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = window_of(self.windows, layer)
            kind, kernel = choose_kernel(q, window)
            plan = self._plans.get((kind, window))
            if plan is None:
                plan = self._plans[kind, window] = chunk_pieces(self.chunks, self.key_places, window, kind, q.device)
            return _ContextAttention.apply(q, k, v, self.num_rows, plan, kernel, window, self.group)

        return gathered


def choose_kernel(q: Tensor, window: int | None) -> tuple[str, PieceKernel]:
    """The kernel for these queries, and the kind of pieces that it computes."""
    if has_varlen_kernel(q):
        if window is None and tree.has_cudnn_kernel(q):
            return "dense", tree.CUDNN_KERNEL
        return "joined", tree.FLASH_KERNEL
    if q.device.type == "cpu" and window is None:
        return "apart", tree.CPU_KERNEL
    return "joined", tree.EXPLICIT_KERNEL


def chunk_pieces(
    chunks: Sequence[Chunk], key_places: Sequence[Index], window: int | None, kind: str, device: torch.device
) -> list[Piece]:
    """The pieces of attention of a rank's chunks, whose rows follow each other, over the keys at the given places.

    joined    one causal piece: each chunk over its sequence up to the chunk's end, or as far as its window reaches
    apart     a causal piece of each chunk over itself, and one of each chunk over what is before it
    dense     as apart for long chunks, each a dense piece; one joined piece for the others
    """
    ends = np.cumsum([0, *(chunk.end - chunk.begin for chunk in chunks)]).tolist()
    rows = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    sizes = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    everything = range(len(chunks))

    def piece(which: Sequence[int], keys: Sequence[Index], is_causal: bool = False, is_further: bool = False) -> Piece:
        queries, index = (_joined(part) for part in ([np.arange(rows[c].start, rows[c].stop) for c in which], keys))
        lengths = [sizes[c] for c in which], [len(part) for part in keys]
        bounds = [torch.tensor(np.cumsum([0, *part]), dtype=torch.int32, device=device) for part in lengths]
        longest = max(lengths[0]), max(lengths[1])
        is_all = len(queries) == ends[-1]
        return Piece(
            slice(0, ends[-1]) if is_all else torch.from_numpy(queries).to(device),
            torch.from_numpy(index).to(device),
            *(bounds[0], bounds[1], longest, is_causal, is_further),
        )

    def visible(c: int) -> Index:
        return key_places[c] if window is None else key_places[c][-(sizes[c] + window - 1) :]

    def before(c: int) -> Index:
        return key_places[c][: -sizes[c]]

    if not chunks:
        return []
    if kind == "joined":
        return [piece(everything, [visible(c) for c in everything], is_causal=True)]
    if kind == "apart":
        later = [c for c in everything if len(before(c))]
        pieces = [piece(everything, [key_places[c][-sizes[c] :] for c in everything], is_causal=True)]
        return pieces + ([piece(later, [before(c) for c in later], is_further=True)] if later else [])
    is_dense = [size >= tree.MIN_DENSE_ROWS for size in sizes]
    others = [c for c in everything if not is_dense[c]]
    pieces = [piece(others, [visible(c) for c in others], is_causal=True)] if others else []
    left_over: list[tuple[int, Index]] = []
    for c in everything:
        if is_dense[c]:
            first = int(key_places[c][-sizes[c]])  # a rank's own keys are in the order of its rows
            pieces.append(dense_piece(rows[c], slice(first, first + sizes[c]), device, is_causal=True))
    for c in everything:
        if is_dense[c] and len(before(c)):
            middle = tree.rounded(len(before(c)), up=False) if len(before(c)) >= tree.MIN_DENSE_SIDE else 0
            if middle:
                keys = torch.from_numpy(before(c)[:middle]).to(device)
                pieces.append(dense_piece(rows[c], keys, device, is_further=True))
            left_over += [(c, before(c)[middle:])] if middle < len(before(c)) else []
    if left_over:
        pieces.append(piece([c for c, _ in left_over], [keys for _, keys in left_over], is_further=True))
    return pieces


class _ContextAttention(torch.autograd.Function):
    """Attention of this rank's queries over all ranks' keys and values. Only this rank's tensors are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, num_rows: int, pieces: list[Piece], kernel: PieceKernel, window: int | None,
        group: ProcessGroup,
    ) -> Tensor:  # fmt: skip
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)  # the rows of padding stay 0
        lse = q.new_empty(0)
        keys, values = _gather_keys(k, v, group)
        if pieces:
            out[:num_rows], lse = forward_pieces(q[:num_rows], keys, values, pieces, kernel, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.num_rows, ctx.plan, ctx.group = num_rows, (pieces, kernel, window), group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        n, group = ctx.num_rows, ctx.group
        keys, values = _gather_keys(k, v, group)
        grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if ctx.plan[0]:
            saved = q[:n], keys, values, out[:n], lse
            grad_q[:n], grad_k, grad_v = backward_pieces(grads[0][:n].contiguous(), *saved, *ctx.plan)
            total = torch.cat([grad_k, grad_v], 1)
        else:
            wide = torch.promote_types(k.dtype, torch.float32)
            total = torch.zeros(len(keys), k.shape[1] + v.shape[1], k.shape[2], dtype=wide, device=k.device)
        grad_k, grad_v = reduce_scatter_rows(total, group).to(k.dtype).split([k.shape[1], v.shape[1]], 1)
        return grad_q, grad_k, grad_v, None, None, None, None, None


def _gather_keys(k: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values [ranks * each, kv_heads, D] of all ranks, in the order of the ranks."""
    keys, values = all_gather_rows(torch.cat([k, v], 1), group).split([k.shape[1], v.shape[1]], 1)
    return keys, values


def _joined(parts: Iterable[Index]) -> Index:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
