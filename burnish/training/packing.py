"""Packs sequences into micro-batches: within a token budget, few of them, and of about equal cost.

The packing changes memory and speed, never the gradient, because a loss is a weighted sum with weights that are fixed before the
split. A unit of packing is a sequence, or several sequences of one group whose shared prefixes go through the model once. A unit
costs its tokens plus, for attention, a multiple of their squares.

The sequences of a group form a prefix tree: samples share their prompt, and the paths of a trajectory share what was not rewritten
between them. In depth-first order each sequence shares its longest prefix with the one before it. A tree above the token budget is cut
between two sequences; the path to the cut is computed on both sides.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from burnish.core.batch import Batch

ATTENTION_COST = 1 / 30_000
"""Default of b / a in the cost a L + b L^2: at 30,000 tokens attention costs as much as the matmuls."""
MIN_SAVED_FRACTION = 0.05
"""Minimum fraction of a batch's tokens that sharing must save. Below it, gathering keys and values costs more than it saves."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PrefixTree:
    """The sequences of a group in depth-first order, and how many tokens each shares with the one before it; 0 for the first."""

    members: list[int]
    shared: list[int]


@dataclass(frozen=True)
class Unit:
    """Sequences that stay together, with the tokens that each shares with the one before it, and what they cost."""

    members: list[int]
    shared: list[int]
    num_tokens: int
    """Tokens of the budget: those that go through the model."""
    cost: float


def prefix_trees(batch: Batch) -> list[PrefixTree]:
    """The prefix tree of each group.

    Every sequence keeps at least one token of its own. Tokens are compared, not masks, so more than the prompt may be shared. Placeholder
    tokens are equal only if they stand for the same image.
    """
    tokens, offsets = batch.distinct_tokens().numpy(), batch.offsets.tolist()
    rows = [tokens[start:end] for start, end in pairwise(offsets)]
    trees = []
    for members in _by_group(batch.sequence["group_ids"].tolist()).values():
        if len(members) > 1:
            # Big-endian bytes compare like the tokens, at the speed of memcmp.
            members.sort(key=lambda i: rows[i].astype(">i8").tobytes())
        shared = [_common_prefix(rows[a], rows[b]) for a, b in pairwise(members)]
        trees.append(PrefixTree(members, [0, *shared]))
    return trees


def _common_prefix(before: Tokens, row: Tokens) -> int:
    """How many tokens two sequences begin with in common, without the last token of the second."""
    length = max(0, min(len(before), len(row) - 1))
    differs = before[:length] != row[:length]
    return int(differs.argmax()) if differs.any() else length


def _by_group(groups: Sequence[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return members


def unshared_trees(groups: Sequence[int]) -> list[PrefixTree]:
    """Each group in its given order, with nothing shared."""
    return [PrefixTree(members, [0] * len(members)) for members in _by_group(groups).values()]


def sharing_pays(lengths: Sequence[int], trees: Sequence[PrefixTree]) -> bool:
    """Whether computing shared prefixes once saves at least `MIN_SAVED_FRACTION` of the tokens."""
    return sum(sum(tree.shared) for tree in trees) > MIN_SAVED_FRACTION * sum(lengths)


def tree_cost(lengths: Sequence[int], tree: PrefixTree, attention_cost: float = ATTENTION_COST) -> float:
    """The cost of a tree's own tokens: a sequence costs what it adds to that of its prefix."""
    spans = [(lengths[i], shared) for i, shared in zip(tree.members, tree.shared, strict=True)]
    return sum(length - shared + attention_cost * (length**2 - shared**2) for length, shared in spans)


def sequence_units(lengths: Sequence[int], attention_cost: float = ATTENTION_COST) -> list[Unit]:
    """One unit per sequence."""
    return [Unit([i], [0], length, length + attention_cost * length**2) for i, length in enumerate(lengths)]


def tree_units(
    lengths: Sequence[int], trees: Sequence[PrefixTree], budget: int, attention_cost: float = ATTENTION_COST
) -> list[Unit]:
    """Parts of trees within the budget. A tree is cut where it exceeds the budget, and where nothing is shared."""
    units = []
    for tree in trees:
        part, size = PrefixTree([], []), 0
        for i, shared in zip(tree.members, tree.shared, strict=True):
            own = lengths[i] - shared
            if part.members and (not shared or size + own > budget):  # smaller units fill a budget better
                units.append(_unit(lengths, part, attention_cost))
                part, size = PrefixTree([], []), 0
            part.shared.append(shared if part.members else 0)
            part.members.append(i)
            size += lengths[i] - part.shared[-1]
        units.append(_unit(lengths, part, attention_cost))
    return units


def whole_tree_units(
    lengths: Sequence[int], trees: Sequence[PrefixTree], attention_cost: float = ATTENTION_COST
) -> list[Unit]:
    """One unit per group, also above the budget."""
    return [_unit(lengths, tree, attention_cost) for tree in trees]


def _unit(lengths: Sequence[int], tree: PrefixTree, attention_cost: float) -> Unit:
    num_tokens = sum(lengths[i] for i in tree.members) - sum(tree.shared)
    return Unit(tree.members, tree.shared, num_tokens, tree_cost(lengths, tree, attention_cost))


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
