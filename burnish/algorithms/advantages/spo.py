"""Advantages between the token and the answer: Monte-Carlo values where answers are cut into segments or branch.

Segment policy optimisation, SPO (2505.23564). What the rollouts must bring along is named in each function.
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


def cutpoints(batch: Batch, rho: float = 0.9, every: int = 5) -> tuple[Tensor, Ragged]:
    """Cuts answers where the policy was unsure: a segment begins with every `every`-th token of probability below rho.

    Returns `segment_ids` [N] (0, 1, ... in each sequence; -1 where the model did not write, and in a sequence without
    any such token) and the place among the N tokens with which each segment starts. The border of a segment is the state
    before that token: its value is the mean reward of answers continued from there. Probabilities are those of
    `old_logp`, or of `behaviour_logp` while rollouts are still being made.
    """
    tokens = action_tokens(batch)
    logp = tokens.take(batch.token["old_logp" if "old_logp" in batch.token else "behaviour_logp"])
    unsure = (logp < math.log(rho)).double()
    segment = segment_cumsum(unsure, tokens.offsets).long() // every  # [M]
    inside = tokens.lengths > 0
    first = torch.zeros_like(tokens.lengths)  # [S] a segment cannot start before the first token: no empty one there
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
    ids = tokens.put(segment + 1) - 1  # unwritten tokens hold -1
    return ids, Ragged(at if tokens.where is None else tokens.where[at], offsets_from_lengths(counts))


def spo_chain(batch: Batch) -> Tensor:
    """[N] the rise in value over the segment a token is in: A = V(next border) - V(border). SPO-chain (2505.23564).

    Needs the token column `segment_ids` of `cutpoints` and the ragged column `border_values`: for each sequence the value
    of the state before each of its segments, the first being the end of the prompt. After the last segment stands
    the sequence's own reward. A sequence without segments has advantage 0.
    """
    borders = batch.ragged["border_values"]
    values, offsets = borders.values, borders.offsets
    after = torch.empty_like(values)
    after[:-1] = values[1:]
    some = offsets.diff() > 0
    after[offsets[1:][some] - 1] = batch.sequence["reward"][some].to(values.dtype)
    where, of_token = tokens_of_segments(batch, borders)
    return values.new_zeros(batch.num_tokens).index_copy(0, where, (after - values)[of_token])


def spo_tree(batch: Batch, normalise: Literal["none", "std"] = "none") -> Tensor:
    """[N] the value of a node of a tree of rollouts minus that of its parent: A = V(child) - V(parent). SPO-tree (2505.23564).

    Every sequence is a path from the root, the end of the prompt, to a leaf: the ragged column `nodes` has the nodes it passes, and
    `segment_ids` which of the edges into them a token is on (-1 where another sequence trains that edge; advantage 0 there). A
    leaf's value is its reward, any other node's the mean of its children. `normalise="std"` divides by the siblings' population
    deviation + 1e-8.
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
    # What is 0 on paper must be 0: a mean of a few values, in whatever order they were added, is off by a few roundings of the largest.
    rounding = 1e-12 * siblings.max(value[edges].abs())
    rise = torch.where(rise.abs() <= rounding, torch.zeros_like(rise), rise)
    if normalise == "std":
        rise = rise / (siblings.mean(rise**2).sqrt() + 1e-8)
    rise = torch.where(siblings.is_constant(value[edges]), torch.zeros_like(rise), rise)
    where, of_token = tokens_of_segments(batch, paths)
    of_node = value.new_zeros(num).index_copy(0, edges, rise)
    return value.new_zeros(batch.num_tokens).index_copy(0, where, of_node[node[of_token]])


def tokens_of_segments(batch: Batch, segments: Ragged) -> tuple[Tensor, Tensor]:
    """The tokens [M] that are in a segment by `segment_ids`, and the place of each one's segment among all of `segments`."""
    ids = batch.token["segment_ids"]
    where = ((ids >= 0) & batch.action_mask).nonzero().squeeze(1)
    sequence = batch.sequence_ids[where]
    of_token = segments.offsets[:-1][sequence] + ids[where]
    if bool((of_token >= segments.offsets[1:][sequence]).any()):
        raise ValueError("a token's segment_ids is past the last segment of its sequence")
    return where, of_token


def _tree_nodes(batch: Batch, paths: Ragged) -> tuple[Tensor, Tensor, int]:
    """Of every step of every path the node it comes to and the one it comes from, numbered from 0, roots too; and how many."""
    groups, _ = compact_ids(batch.sequence["group_ids"])
    parent = paths.values.roll(1)
    parent[paths.offsets[:-1]] = -1 - groups  # a root of its own for each group
    ids, num = compact_ids(torch.cat([paths.values, parent]))
    return ids[: paths.values.shape[0]], ids[paths.values.shape[0] :], num


def _node_values(child: Tensor, parent: Tensor, rewards: Tensor) -> Tensor:
    """[nodes] leaves first, then whatever has all its children's values: one pass a level of the tree."""
    num, value = rewards.shape[0], rewards
    children = segment_count(parent, num)
    known = children == 0
    while not bool(known.all()):
        ready = ~known & (segment_sum(known[child].long(), parent, num) == children)
        if not bool(ready.any()):
            raise ValueError("the paths go round in a circle; they must be trees")
        value = torch.where(ready, segment_mean(value[child], parent, num), value)
        known = known | ready
    return value
