"""Packs sequences into micro-batches: within a token budget, few of them, and of about equal cost.

The packing changes memory and speed, never the gradient, because a loss is a weighted sum with weights that are fixed before the
split. A unit of packing is a sequence, or several samples of one prompt whose shared prefix goes through the model once. A unit
costs its tokens plus, for attention, a multiple of their squares.
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

ATTENTION_COST = 1 / 30_000
"""Default of b / a in the cost a L + b L^2: at 30,000 tokens attention costs as much as the matmuls."""
MIN_SAVED_FRACTION = 0.05
"""Minimum fraction of a batch's tokens that sharing must save. Below it, gathering keys and values costs more than it saves."""


@dataclass(frozen=True)
class Unit:
    """Sequences that stay together, the tokens they take of the budget, and their cost."""

    members: list[int]
    num_tokens: int
    cost: float


def sequence_units(lengths: Sequence[int], attention_cost: float = ATTENTION_COST) -> list[Unit]:
    """One unit per sequence."""
    return [Unit([i], length, length + attention_cost * length**2) for i, length in enumerate(lengths)]


def group_units(
    lengths: Sequence[int],
    groups: Sequence[int],
    shared: Sequence[int],
    budget: int,
    attention_cost: float = ATTENTION_COST,
) -> list[Unit]:
    """The sequences of a group together, with their first `shared` tokens counted once. A group above the budget becomes several units.

    All members of a group have the same number of shared tokens, and each has at least one more token.
    """
    by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    units = []
    for members in by_group.values():
        prefix = shared[members[0]]
        parts: list[list[int]] = []
        size = 0
        for i in sorted(members, key=lambda i: lengths[i]):
            own = lengths[i] - prefix
            if parts and prefix and size + own <= budget:
                parts[-1].append(i)
                size += own
            else:  # also if nothing is shared: smaller units fill a budget better
                parts.append([i])
                size = prefix + own
        for part in parts:
            squares = sum(lengths[i] ** 2 - prefix**2 for i in part) + prefix**2
            tokens = sum(lengths[i] - prefix for i in part) + prefix
            units.append(Unit(part, tokens, tokens + attention_cost * squares))
    return units


def whole_group_units(
    lengths: Sequence[int], groups: Sequence[int], shared: Sequence[int], attention_cost: float = ATTENTION_COST
) -> list[Unit]:
    """One unit per group, also above the budget, with its first `shared` tokens counted once."""
    by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    units = []
    for members in by_group.values():
        prefix = shared[members[0]]
        tokens = prefix + sum(lengths[i] - prefix for i in members)
        squares = prefix**2 + sum(lengths[i] ** 2 - prefix**2 for i in members)
        units.append(Unit(members, tokens, tokens + attention_cost * squares))
    return units


def pack_units(units: Sequence[Unit], budget: int) -> list[list[Unit]]:
    """The units of each micro-batch: few micro-batches within the budget, of about equal cost.

    A unit above the budget has a micro-batch of its own.
    """
    fewest = math.ceil(sum(min(unit.num_tokens, budget) for unit in units) / budget)
    filled = _first_fit(units, budget)
    for count in range(fewest, len(filled) + 1):
        parts = karmarkar_karp([unit.cost for unit in units], count)
        if all(len(part) < 2 or sum(units[k].num_tokens for k in part) <= budget for part in parts):
            break
    else:
        parts = filled
    return [[units[k] for k in part] for part in parts]


def _first_fit(units: Sequence[Unit], budget: int) -> list[list[int]]:
    """First-fit decreasing: indices of the units in each micro-batch. The number of micro-batches is near the minimum."""
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


def shared_prefixes(batch: Batch) -> Tensor:
    """[S] length of the prefix that a sequence shares with all others of its group; 0 for a group of one.

    Every sequence keeps at least one token of its own. Tokens are compared, not masks, so more than the prompt may be shared.
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
    is_equal = within & (counterpart == batch.tokens)
    # First position that differs from the group's first sequence; if none does, the last token stays the sequence's own.
    limit = torch.where(is_equal, batch.lengths[ids] - 1, positions)
    common = (batch.lengths - 1).scatter_reduce_(0, ids, limit, "amin")
    of_group = torch.full((num_groups,), batch.num_tokens, device=groups.device).scatter_reduce_(
        0, groups, common, "amin"
    )
    alone = torch.bincount(groups, minlength=num_groups) == 1
    return torch.where(alone, 0, of_group)[groups]


def sharing_pays(lengths: list[int], groups: list[int], shared: list[int]) -> bool:
    """Whether computing shared prefixes once saves at least `MIN_SAVED_FRACTION` of the tokens."""
    counts: dict[int, int] = {}
    saved = 0
    for group, length in zip(groups, shared, strict=True):
        counts[group] = counts.get(group, 0) + 1
        saved += length if counts[group] > 1 else 0
    return saved > MIN_SAVED_FRACTION * sum(lengths)


# --- Largest differencing method (Karmarkar and Karp, 1982) for any number of parts -------------------------------------
#
# Every item starts as its own partition, with its cost in one part. The two partitions whose parts differ most are merged, the
# fullest part of one with the emptiest of the other, until one partition is left.

Sums = npt.NDArray[np.float64]
Parts = npt.NDArray[np.intp]


@dataclass(frozen=True)
class _Merge:
    """Two merged partitions: part k holds part `left_parts[k]` of the left one and part `right_parts[k]` of the right one."""

    left: int
    right: int
    left_parts: Parts
    right_parts: Parts


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Ascending item indices of each part, so that the parts have about equal cost; a part may be empty."""
    if not costs:
        return [[] for _ in range(num_parts)]
    # The sums of a partition are kept in descending order, so an item's cost starts in part 0.
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
    """Walk from the last merge down to the items, tracking which final part each part has become."""
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
