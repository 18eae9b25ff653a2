"""Segment-level advantages from Monte-Carlo values: answers cut into segments (chain), or answers that branch (tree).

Segment policy optimisation, SPO (2505.23564). Each function names the columns that the rollouts must provide.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.reverse_scan import segment_cumsum
from burnish.algorithms.batch_columns import Groups, action_tokens
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import compact_ids, offsets_from_lengths, segment_count, segment_mean, segment_sum


def cutpoints(batch: Batch, rho: float, every: int) -> tuple[Tensor, Ragged]:
    """Cuts answers where the policy was unsure: a segment begins with every `every`-th token of probability below `rho`.

    Returns `segment_ids` [N] and the indices among the N tokens at which segments start. `segment_ids` count from 0 in each
    sequence; they are -1 outside `action_mask` and in a sequence without such a token. The border of a segment is the state
    before its first token; its value is the mean reward of answers continued from there. Probabilities are those of
    `old_logp`, or of `behaviour_logp` while rollouts are being generated.
    """
    tokens = action_tokens(batch)
    logp = tokens.gather(batch.token["old_logp" if "old_logp" in batch.token else "behaviour_logp"])
    unsure = (logp < math.log(rho)).double()
    segment = segment_cumsum(unsure, tokens.offsets).long() // every  # [M]
    inside = tokens.lengths > 0
    first = torch.zeros_like(tokens.lengths)  # [S] id of the first token's segment, so that ids start at 0
    first[inside] = segment[tokens.offsets[:-1][inside]]
    some = torch.zeros_like(inside)
    some[inside] = segment_cumsum(unsure, tokens.offsets)[tokens.offsets[1:][inside] - 1] > 0
    cut = tokens.spread(some)
    segment = torch.where(cut, segment - tokens.spread(first), -1)
    owner = tokens.spread(torch.arange(batch.num_sequences, device=segment.device))
    starts = cut.clone()
    starts[1:] &= (segment[1:] != segment[:-1]) | (owner[1:] != owner[:-1])
    at = starts.nonzero().squeeze(1)
    counts = segment_count(owner[at], batch.num_sequences)
    ids = tokens.scatter(segment + 1) - 1  # -1 outside `action_mask`
    return ids, Ragged(at if tokens.indices is None else tokens.indices[at], offsets_from_lengths(counts))


def spo_chain(batch: Batch) -> Tensor:
    """[N] A = V(next border) - V(border) of the token's segment. SPO-chain (2505.23564).

    Needs the token column `segment_ids` of `cutpoints`, and the ragged column `border_values`: for each sequence the value of
    the state before each of its segments, beginning with the end of the prompt. The value after the last segment is the
    sequence's reward. A sequence without segments has advantage 0.
    """
    borders = batch.ragged["border_values"]
    values, offsets = borders.values, borders.offsets
    after = torch.empty_like(values)
    after[:-1] = values[1:]
    some = offsets.diff() > 0
    after[offsets[1:][some] - 1] = batch.sequence["reward"][some].to(values.dtype)
    where, of_token = tokens_of_segments(batch, borders)
    return values.new_zeros(batch.num_tokens).index_copy(0, where, (after - values)[of_token])


def spo_tree(batch: Batch, *, normalise: Literal["none", "std"]) -> Tensor:
    """[N] A = V(child) - V(parent) of the tree edge a token is on. SPO-tree (2505.23564).

    A leaf's value is its reward; any other node's is the mean of its children. Every sequence is a path from the root (the end
    of the prompt) to a leaf. The ragged column `nodes` holds the nodes of the path. `segment_ids` is the index of the edge
    that the token is on, or -1 with advantage 0 if another sequence trains that edge. `normalise` std divides by the
    siblings' population deviation + 1e-8.
    """
    paths = batch.ragged["nodes"]
    node, parent, num = _tree_nodes(batch, paths)
    above = torch.full((num,), -1, device=node.device).index_copy(0, node, parent)
    edges = (above >= 0).nonzero().squeeze(1)
    leaves = node[paths.offsets[1:] - 1]
    if bool((above[node] != parent).any()) or bool((segment_count(leaves, num) > 1).any()):
        raise ValueError("the paths are not of trees: a node has two parents, or two paths end in one leaf")
    rewards = batch.sequence["reward"]
    value = _node_values(edges, above[edges], rewards.new_zeros(num).index_copy(0, leaves, rewards))
    siblings = Groups(above[edges], num)
    rise = value[edges] - value[above[edges]]
    # A rise of 0 must be exactly 0, but a mean is off by a few roundings of its largest value.
    rounding = 1e-12 * siblings.max(value[edges].abs())
    rise = torch.where(rise.abs() <= rounding, torch.zeros_like(rise), rise)
    if normalise == "std":
        rise = rise / (siblings.mean(rise**2).sqrt() + 1e-8)
    rise = torch.where(siblings.is_constant(value[edges]), torch.zeros_like(rise), rise)
    where, of_token = tokens_of_segments(batch, paths)
    of_node = value.new_zeros(num).index_copy(0, edges, rise)
    return value.new_zeros(batch.num_tokens).index_copy(0, where, of_node[node[of_token]])


def tokens_of_segments(batch: Batch, segments: Ragged) -> tuple[Tensor, Tensor]:
    """[M] the tokens that are in a segment by `segment_ids`, and the index of each one's segment among all `segments`."""
    ids = batch.token["segment_ids"]
    where = ((ids >= 0) & batch.action_mask).nonzero().squeeze(1)
    sequence = batch.sequence_ids[where]
    of_token = segments.offsets[:-1][sequence] + ids[where]
    if bool((of_token >= segments.offsets[1:][sequence]).any()):
        raise ValueError("a token's segment_ids is past the last segment of its sequence")
    return where, of_token


def _tree_nodes(batch: Batch, paths: Ragged) -> tuple[Tensor, Tensor, int]:
    """For every step of every path the node and its parent, both numbered from 0 with roots included; and their number."""
    groups, _ = compact_ids(batch.sequence["group_ids"])
    parent = paths.values.roll(1)
    parent[paths.offsets[:-1]] = -1 - groups  # a root of its own for each group
    ids, num = compact_ids(torch.cat([paths.values, parent]))
    return ids[: paths.values.shape[0]], ids[paths.values.shape[0] :], num


def _node_values(child: Tensor, parent: Tensor, rewards: Tensor) -> Tensor:
    """[nodes] values by passes over the tree from the leaves up: a node gets its value once all its children have one."""
    num, value = rewards.shape[0], rewards
    children = segment_count(parent, num)
    known = children == 0
    while not bool(known.all()):
        ready = ~known & (segment_sum(known[child].long(), parent, num) == children)
        if not bool(ready.any()):
            raise ValueError("the paths contain a cycle; they must be trees")
        value = torch.where(ready, segment_mean(value[child], parent, num), value)
        known = known | ready
    return value
