"""The edges of a tree of rollouts that are trained on this time."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.advantages.splits import tokens_of_segments
from burnish.algorithms.filters.columns import lexsort
from burnish.core.batch import Batch
from burnish.core.noise import uniforms
from burnish.core.segments import compact_ids, ids_from_offsets, offsets_from_lengths, segment_count


def tree_edges(batch: Batch, most: int = 32) -> Tensor:
    """[N] bool: of each tree only edges with an advantage other than 0 stay, at most `most`. SPO-tree (2505.23564).

    They are taken in an order that is drawn from the keys of their sequences, the same whenever the tree is used: a tree that comes
    back for the k-th time (column `use`) goes on where it was, so no edge is trained twice.
    """
    paths = batch.ragged["nodes"]
    where, edge = tokens_of_segments(batch, paths)
    moves, owner = _with_advantage(batch, where, edge)
    chosen = moves.nonzero().squeeze(1)
    groups, num = compact_ids(batch.sequence["group_ids"])
    noise = uniforms(batch.sequence["key"][owner], chosen - paths.offsets[owner])
    order = lexsort(noise, groups[owner])
    starts = offsets_from_lengths(segment_count(groups[owner], num))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device) - starts[groups[owner][order]]
    used = _uses(batch)[owner]
    now = (rank >= most * used) & (rank < most * (used + 1))
    kept = torch.zeros_like(moves).index_copy(0, chosen, now)
    mask = torch.zeros_like(batch.loss_mask).index_copy(0, where, kept[edge])
    return batch.loss_mask & mask


def edges_left(batch: Batch, most: int = 32) -> Tensor:
    """[S] bool: whether the tree of a sequence has edges that `tree_edges` keeps for a later time."""
    owner = _with_advantage(batch, *tokens_of_segments(batch, batch.ragged["nodes"]))[1]
    groups, num = compact_ids(batch.sequence["group_ids"])
    return segment_count(groups[owner], num)[groups] > most * (_uses(batch) + 1)


def _with_advantage(batch: Batch, where: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """[E] bool, which edges of all paths have an advantage other than 0 at any of their tokens; and the sequence of each that has."""
    sequence = ids_from_offsets(batch.ragged["nodes"].offsets)  # [E]
    moves = torch.zeros(sequence.shape[0], dtype=torch.bool, device=where.device)
    moves[edge[batch.token["advantages"][where] != 0]] = True
    return moves, sequence[moves]


def _uses(batch: Batch) -> Tensor:
    """[S] how often a sequence was used before."""
    if "use" not in batch.sequence:
        return torch.zeros_like(batch.sequence["group_ids"])
    return batch.sequence["use"].nan_to_num(0.0).long()
