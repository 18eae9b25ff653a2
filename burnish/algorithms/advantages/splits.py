"""Advantages between the token and the answer: Monte-Carlo values where answers are cut into segments or branch.

Segment policy optimisation, SPO (2505.23564). What the rollouts must bring along is named in each function.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.groups import Groups
from burnish.algorithms.advantages.written import written
from burnish.algorithms.recurrence import running_sum
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import compact_ids, offsets_from_lengths, segment_count, segment_mean, segment_sum


def cutpoints(batch: Batch, rho: float = 0.9, every: int = 5) -> tuple[Tensor, Ragged]:
    """Cuts answers where the policy was unsure: a segment begins with every `every`-th token of probability below rho.

    Returns `segment_ids` [N] (0, 1, ... in each sequence; -1 where the model did not write, and in a sequence without
    any such token) and the place among the N tokens with which each segment starts. The border of a segment is the state
    before that token: its value is the mean reward of answers continued from there. Probabilities are those of
    `old_logp`, or of `behaviour_logp` while rollouts are still being made.
    """
    tokens = written(batch)
    logp = tokens.take(batch.token["old_logp" if "old_logp" in batch.token else "behaviour_logp"])
    unsure = (logp < math.log(rho)).double()
    segment = running_sum(unsure, tokens.offsets).long() // every  # [M]
    inside = tokens.lengths > 0
    first = torch.zeros_like(tokens.lengths)  # [S] a segment cannot start before the first token: no empty one there
    first[inside] = segment[tokens.offsets[:-1][inside]]
    some = torch.zeros_like(inside)
    some[inside] = running_sum(unsure, tokens.offsets)[tokens.offsets[1:][inside] - 1] > 0
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
    ids = batch.token["segment_ids"]
    where = ((ids >= 0) & batch.action_mask).nonzero().squeeze(1)
    of_token = torch.repeat_interleave(offsets[:-1], batch.lengths)[where] + ids[where]
    if bool((of_token >= torch.repeat_interleave(offsets[1:], batch.lengths)[where]).any()):
        raise ValueError("a token's segment_ids is past the last of its sequence's border_values")
    rise = (after - values)[of_token]
    return values.new_zeros(batch.num_tokens).index_copy(0, where, rise)


def spo_tree(batch: Batch, normalise: Literal["none", "std"] = "none") -> Tensor:
    """[S] the value of a node of a tree of rollouts minus that of its parent: A = V(child) - V(parent). SPO-tree (2505.23564).

    Every sequence is the edge into one node: `node_ids` [S] that node, `parent_ids` [S] the node it was continued from
    (a root has no sequence, so its id stands only there). A leaf's value is its reward, any other node's the mean of its
    children. `normalise="std"` divides by the siblings' population deviation + 1e-8.
    """
    edges = batch.num_sequences
    nodes, num = compact_ids(torch.cat([batch.sequence["node_ids"], batch.sequence["parent_ids"]]))
    child, parent = nodes[:edges], nodes[edges:]
    if bool((segment_count(child, num) > 1).any()):
        raise ValueError("two sequences have the same node_ids; a node of the tree has one edge into it")
    siblings = Groups(parent, num)
    value = _node_values(child, parent, num, batch.sequence["reward"])
    advantages = value[child] - value[parent]
    if normalise == "std":
        advantages = advantages / (siblings.mean(advantages**2).sqrt() + 1e-8)
    return torch.where(siblings.is_constant(value[child]), torch.zeros_like(advantages), advantages)


def _node_values(child: Tensor, parent: Tensor, num: int, rewards: Tensor) -> Tensor:
    """[nodes] leaves first, then whatever has all its children's values: one pass a level of the tree."""
    children = segment_count(parent, num)
    known = children == 0
    value = rewards.new_zeros(num).index_copy(0, child, rewards)
    while not bool(known.all()):
        ready = ~known & (segment_sum(known[child].long(), parent, num) == children)
        if not bool(ready.any()):
            raise ValueError("node_ids and parent_ids go round in a circle; they must be trees")
        value = torch.where(ready, segment_mean(value[child], parent, num), value)
        known = known | ready
    return value
