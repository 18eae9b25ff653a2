"""Micro-batches: which sequences go through the model together, under a token budget and about equally costly.

Which sequences share a micro-batch changes memory and speed, never the gradient: a loss is a weighted sum whose weights
are fixed before the split. What is packed are units: a sequence, or the samples of one prompt, whose shared tokens go
through the model once. A unit costs its tokens and, with their squares, its attention.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import compact_ids

# --- Dividing work evenly: the largest-differencing method of Karmarkar and Karp (1982) for any number of parts.
#
# Every item begins as a partition of its own: its cost in one part, nothing in the others. The two partitions whose parts
# differ most are merged, the fullest part of one with the emptiest of the other, until one is left.

Sums = npt.NDArray[np.float64]
Parts = npt.NDArray[np.intp]


@dataclass(frozen=True)
class _Merge:
    """Two partitions made one: its part k holds part `left_parts[k]` of the left one and `right_parts[k]` of the right."""

    left: int
    right: int
    left_parts: Parts
    right_parts: Parts


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices of the items of each part, in rising order, so that the parts cost about the same; a part may be empty."""
    if not costs:
        return [[] for _ in range(num_parts)]
    # Only where an item's cost lies matters at first: part 0, the fullest. All partitions keep their sums falling.
    sums: dict[int, Sums] = {}
    heap: list[tuple[float, int]] = []
    for item, cost in enumerate(costs):
        sums[item] = np.zeros(num_parts)
        sums[item][0] = cost
        heap.append((-float(cost) if num_parts > 1 else 0.0, item))
    heapq.heapify(heap)
    merges: list[_Merge] = []
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        total = sums.pop(left) + sums.pop(right)[::-1]
        order = np.argsort(-total, kind="stable")
        node = len(costs) + len(merges)
        merges.append(_Merge(left, right, order, num_parts - 1 - order))
        sums[node] = total[order]
        heapq.heappush(heap, (float(sums[node][-1] - sums[node][0]), node))
    return _assign_items(merges, len(costs), num_parts, heap[0][1])


def _assign_items(merges: list[_Merge], num_items: int, num_parts: int, root: int) -> list[list[int]]:
    """Walk down from the last merge to the items, carrying along which part of the result each part has become."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    waiting: list[tuple[int, Parts]] = [(root, np.arange(num_parts))]
    while waiting:
        node, becomes = waiting.pop()
        if node < num_items:
            parts[int(becomes[0])].append(node)
            continue
        merge = merges[node - num_items]
        for child, its_parts in ((merge.left, merge.left_parts), (merge.right, merge.right_parts)):
            of_child = np.empty(num_parts, dtype=np.intp)
            of_child[its_parts] = becomes
            waiting.append((child, of_child))
    return [sorted(part) for part in parts]


ATTENTION_COST = 1 / 30_000
"""b / a of the cost a L + b L^2 where a model does not say: attention over 30,000 tokens costs what its matmuls do."""


@dataclass(frozen=True)
class Unit:
    """Sequences that stay together, the tokens they need of the budget, and what they cost."""

    members: list[int]
    num_tokens: int
    cost: float


def sequence_units(lengths: Sequence[int], attention_cost: float = ATTENTION_COST) -> list[Unit]:
    """Every sequence by itself."""
    return [Unit([i], length, length + attention_cost * length**2) for i, length in enumerate(lengths)]


def group_units(
    lengths: Sequence[int],
    groups: Sequence[int],
    shared: Sequence[int],
    budget: int,
    attention_cost: float = ATTENTION_COST,
) -> list[Unit]:
    """The sequences of a group together, their first `shared` tokens counted once; a group above the budget in several units.

    All members of a group have the same number of shared tokens, each fewer than it has tokens.
    """
    by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    units = []
    for members in by_group.values():
        trunk = shared[members[0]]
        parts: list[list[int]] = []
        size = 0
        for i in sorted(members, key=lambda i: lengths[i]):
            own = lengths[i] - trunk
            if parts and trunk and size + own <= budget:
                parts[-1].append(i)
                size += own
            else:  # without anything shared a sequence is a unit by itself: smaller ones fill a budget better
                parts.append([i])
                size = trunk + own
        for part in parts:
            squares = sum(lengths[i] ** 2 - trunk**2 for i in part) + trunk**2
            tokens = sum(lengths[i] - trunk for i in part) + trunk
            units.append(Unit(part, tokens, tokens + attention_cost * squares))
    return units


def whole_group_units(
    lengths: Sequence[int], groups: Sequence[int], shared: Sequence[int], attention_cost: float = ATTENTION_COST
) -> list[Unit]:
    """The sequences of every group together, whatever the budget, their first `shared` tokens counted once."""
    by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    units = []
    for members in by_group.values():
        trunk = shared[members[0]]
        tokens = trunk + sum(lengths[i] - trunk for i in members)
        squares = trunk**2 + sum(lengths[i] ** 2 - trunk**2 for i in members)
        units.append(Unit(members, tokens, tokens + attention_cost * squares))
    return units


def pack_units(units: Sequence[Unit], budget: int, at_least: int = 0) -> list[list[Unit]]:
    """The units of each micro-batch: few micro-batches, none above the budget, of about the same cost.

    A unit above the budget has a micro-batch of its own. Asked for at least so many, those that find no unit are empty:
    ranks that work together need the same number.
    """
    fewest = max(at_least, math.ceil(sum(min(unit.num_tokens, budget) for unit in units) / budget))
    filled = _first_fit(units, budget)
    for count in range(fewest, max(len(filled), at_least) + 1):
        parts = karmarkar_karp([unit.cost for unit in units], count)
        if all(len(part) < 2 or sum(units[k].num_tokens for k in part) <= budget for part in parts):
            break
    else:
        parts = filled + [[] for _ in range(at_least - len(filled))]
    return [[units[k] for k in part] for part in parts]


def _first_fit(units: Sequence[Unit], budget: int) -> list[list[int]]:
    """Units of each micro-batch, the largest first, each into the first one with room; never far from the fewest."""
    parts: list[list[int]] = []
    room: list[int] = []
    for k in sorted(range(len(units)), key=lambda k: (-units[k].num_tokens, k)):
        size = units[k].num_tokens
        place = next((p for p, left in enumerate(room) if left >= size), None)
        if place is None:
            parts.append([k])
            room.append(budget - size)
        else:
            parts[place].append(k)
            room[place] -= size
    return parts


# --- Which samples of a batch begin alike: the prompt of a group, which its samples share in the learner's forward and backward.

MIN_SAVED_FRACTION = 0.05
"""Least share of a batch's tokens that must be saved: below it the gathering of keys and values costs more."""


def shared_prefixes(batch: Batch) -> Tensor:
    """[S] how many first tokens a sequence has in common with all others of its group; 0 where it is alone.

    Each keeps at least one token of its own. By tokens, not by masks: whatever samples begin with in common they share.
    """
    groups, num_groups = compact_ids(batch.sequence["group_ids"])
    sequence = torch.arange(batch.num_sequences, device=groups.device)
    first = torch.full((num_groups,), batch.num_sequences, device=groups.device).scatter_reduce_(
        0, groups, sequence, "amin"
    )
    ids, positions = batch.sequence_ids, batch.positions
    partner = first[groups][ids]
    within = positions < batch.lengths[partner]
    counterpart = batch.tokens[torch.where(within, batch.offsets[partner] + positions, 0)]
    alike = within & (counterpart == batch.tokens)
    # The first token that differs from the group's first sequence; a sequence that never does keeps its last token.
    limit = torch.where(alike, batch.lengths[ids] - 1, positions)
    common = (batch.lengths - 1).scatter_reduce_(0, ids, limit, "amin")
    of_group = torch.full((num_groups,), batch.num_tokens, device=groups.device).scatter_reduce_(
        0, groups, common, "amin"
    )
    alone = torch.bincount(groups, minlength=num_groups) == 1
    return torch.where(alone, 0, of_group)[groups]


def sharing_pays(lengths: list[int], groups: list[int], shared: list[int]) -> bool:
    """Whether computing the shared tokens once saves enough."""
    counts: dict[int, int] = {}
    saved = 0
    for group, length in zip(groups, shared, strict=True):
        counts[group] = counts.get(group, 0) + 1
        saved += length if counts[group] > 1 else 0
    return saved > MIN_SAVED_FRACTION * sum(lengths)
