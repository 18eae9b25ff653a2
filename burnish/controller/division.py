"""Which sequences of a batch go to which rank: about the same work for all.

A batch is divided by whole groups, since the samples of a prompt share its work. Nothing depends on how: token weights are
fixed on the whole mini-batch before it is divided.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from burnish.core.batch import Batch
from burnish.training.balance import karmarkar_karp
from burnish.training.packing import ATTENTION_COST

FEW_PARTS = 64
"""Up to so many parts are balanced by the better method, whose time grows with their number."""
Runs = list[tuple[int, int]]
"""Sequences [start, stop), one after the other."""


@dataclass(frozen=True)
class Division:
    """Which sequences of a batch each part has, in rising order."""

    runs: list[Runs]
    offsets: np.ndarray  # [S+1] of the whole batch

    @property
    def num_parts(self) -> int:
        return len(self.runs)

    def stretches(self, part: int) -> Runs:
        """The same as tokens [start, stop)."""
        runs, ends = self.stretches_in_order[0], self.run_ends
        return runs[ends[part] : ends[part + 1]]

    @cached_property
    def run_ends(self) -> list[int]:
        """How many runs the parts before each have, and all."""
        return [0, *accumulate(len(runs) for runs in self.runs)]

    @cached_property
    def in_order(self) -> tuple[Runs, list[int]]:
        """The runs of all parts one after the other, and how many sequences the parts before each have."""
        runs = [run for part in self.runs for run in part]
        return runs, self._ends(runs)

    @cached_property
    def stretches_in_order(self) -> tuple[Runs, list[int]]:
        """The same of tokens."""
        bounds = np.array(self.in_order[0], dtype=np.int64).reshape(-1, 2)
        stretches: Runs = list(zip(*self.offsets[bounds].T.tolist(), strict=True)) if len(bounds) else []
        return stretches, self._ends(stretches)

    def _ends(self, runs: Runs) -> list[int]:
        sizes = [0, *accumulate(stop - start for start, stop in runs)]
        return [sizes[k] for k in self.run_ends]


def divide(batch: Batch, num_parts: int, stretches: int = 1, attention_cost: float = ATTENTION_COST) -> Division:
    """Every sequence once, about the same work for all; a part may be empty.

    A sequence of L tokens costs L + attention_cost L^2; what a group was given to begin with counts once. With several
    `stretches` the work is about the same in each of so many stretches of groups: those that mini-batches will be made of.
    """
    offsets = batch.offsets.cpu().numpy()
    lengths = np.diff(offsets)
    units = _units(batch, len(lengths))
    costs = _costs(batch, units, lengths.astype(np.float64), offsets, attention_cost)
    held, given = [0.0] * num_parts, [list[int]() for _ in range(num_parts)]
    count = max(1, min(stretches, len(units)))
    for k in range(count):
        first, last = k * len(units) // count, (k + 1) * len(units) // count
        own = costs[first:last]
        parts = karmarkar_karp(own, num_parts) if num_parts <= FEW_PARTS else emptiest_first(own, num_parts)
        weights = [sum(own[item] for item in part) for part in parts]
        # The heaviest of this stretch to whoever has least of those before.
        for part, rank in zip(_order(weights)[::-1], _order(held), strict=True):
            given[rank] += [first + item for item in parts[part]]
            held[rank] += weights[part]
    return Division([_runs([run for k in part for run in units[k]]) for part in given], offsets)


def _order(amounts: Sequence[float]) -> list[int]:
    """Indices from the smallest amount up."""
    return sorted(range(len(amounts)), key=lambda i: amounts[i])


def division_of(owners: np.ndarray, num_parts: int, offsets: np.ndarray) -> Division:
    """The division in which every sequence goes to the part that `owners` [S] says."""
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    stops = np.append(starts[1:], len(owners))
    runs: list[Runs] = [[] for _ in range(num_parts)]
    for start, stop, owner in zip(starts.tolist(), stops.tolist(), owners[starts].tolist(), strict=True):
        runs[owner].append((start, stop))
    return Division(runs, offsets)


def emptiest_first(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Items from the heaviest down, each to the part that has least (Graham, 1969): parts differ by at most one item's cost."""
    heap = [(0.0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        held, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (held + costs[item], part))
    return [sorted(part) for part in parts]


def _units(batch: Batch, num_sequences: int) -> list[Runs]:
    """The groups as runs of sequences; a sequence of its own where there are none."""
    if "group_ids" not in batch.sequence or not num_sequences:
        return [[(i, i + 1)] for i in range(num_sequences)]
    groups = batch.sequence["group_ids"].cpu().numpy()
    starts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
    stops = np.append(starts[1:], num_sequences).tolist()
    units: dict[int, Runs] = {}
    for start, stop, group in zip(starts.tolist(), stops, groups[starts].tolist(), strict=True):
        units.setdefault(group, []).append((start, stop))
    return list(units.values())


def _costs(
    batch: Batch, units: list[Runs], lengths: np.ndarray, offsets: np.ndarray, attention_cost: float
) -> list[float]:
    if not units:
        return []
    cost = lengths + attention_cost * lengths**2
    before = np.concatenate([[0.0], np.cumsum(cost)])
    starts, stops = np.array([run for runs in units for run in runs], dtype=np.int64).reshape(-1, 2).T
    of = np.repeat(np.arange(len(units)), [len(runs) for runs in units])
    totals: np.ndarray = np.bincount(of, weights=before[stops] - before[starts], minlength=len(units))
    if "action_mask" in batch.token:  # the prompt ends where the group's first sample begins to write
        mask, counts = (
            batch.token["action_mask"].cpu().numpy(),
            np.bincount(of, weights=stops - starts, minlength=len(units)),
        )
        firsts = np.array([runs[0][0] for runs in units], dtype=np.int64)
        bounds = zip(offsets[firsts].tolist(), offsets[firsts + 1].tolist(), strict=True)
        given = np.array([mask[a:b].argmax() for a, b in bounds], dtype=np.float64)
        totals = totals - (counts - 1) * (given + attention_cost * given**2)
    found: list[float] = totals.tolist()
    return found


def _runs(runs: Runs) -> Runs:
    """Neighbours made one."""
    joined: Runs = []
    for start, stop in sorted(runs):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
