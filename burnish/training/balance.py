"""Dividing work evenly: the largest-differencing method of Karmarkar and Karp (1982) for any number of parts.

Every item begins as a partition of its own: its cost in one part, nothing in the others. The two partitions whose parts
differ most are merged, the fullest part of one with the emptiest of the other, until one is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    return _unfold(merges, len(costs), num_parts, heap[0][1])


def _unfold(merges: list[_Merge], num_items: int, num_parts: int, root: int) -> list[list[int]]:
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
