"""Dividing a call over ranks and putting its results together: the arithmetic behind the marks of `core/spread.py`.

A batch is divided by whole groups, since the samples of a prompt share its work. Nothing depends on how: token weights are
fixed on the whole mini-batch before it is divided.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.wire import MARK, Arrays, Packed, to_arrays
from burnish.training.balance import karmarkar_karp
from burnish.training.packing import ATTENTION_COST
from burnish.training.parallel.ranks import PLACE

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
        return [(int(self.offsets[a]), int(self.offsets[b])) for a, b in self.runs[part]]


def divide(batch: Batch, num_parts: int, attention_cost: float = ATTENTION_COST) -> Division:
    """Every sequence once, about the same work for all; a part may be empty.

    A sequence of L tokens costs L + attention_cost L^2; what a group was given to begin with counts once.
    """
    offsets = batch.offsets.cpu().numpy()
    lengths = np.diff(offsets)
    units = _units(batch, len(lengths))
    costs = _costs(batch, units, lengths.astype(np.float64), offsets, attention_cost)
    parts = karmarkar_karp(costs, num_parts) if num_parts <= FEW_PARTS else emptiest_first(costs, num_parts)
    return Division([_runs([unit for k in part for unit in units[k]]) for part in parts], offsets)


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
    cost = lengths + attention_cost * lengths**2
    before = np.concatenate([[0.0], np.cumsum(cost)])
    mask = batch.token["action_mask"].cpu().numpy() if "action_mask" in batch.token else None
    costs = []
    for runs in units:
        total = sum(float(before[stop] - before[start]) for start, stop in runs)
        count = sum(stop - start for start, stop in runs)
        if mask is not None and count > 1:  # the prompt ends where the group's first sample begins to write
            first = runs[0][0]
            given = float(mask[offsets[first] : offsets[first + 1]].argmax())
            total -= (count - 1) * (given + attention_cost * given**2)
        costs.append(total)
    return costs


def _runs(runs: Runs) -> Runs:
    """Neighbours made one."""
    joined: Runs = []
    for start, stop in sorted(runs):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


# --- apart ---------------------------------------------------------------------------------------------------------------


class Divided:
    """A batch in parts that can be sent: made once, however many calls are given it."""

    def __init__(self, batch: Batch, num_parts: int) -> None:
        self.division = divide(batch, num_parts)
        places = {f"sequence/{PLACE}": np.arange(batch.num_sequences)}  # by which order can be restored
        arrays = to_arrays(batch) | places
        lengths = {label: np.diff(array) for label, array in arrays.items() if label.startswith(("offsets", "bounds/"))}
        self.parts = [_part(arrays, lengths, self.division, part) for part in range(num_parts)]
        self.stored: dict[Any, Any] = {}
        """What stands for parts in a store; of whoever put them there."""


@dataclass(frozen=True)
class Slot:
    """Where in the arguments of a call a part of a batch goes."""

    number: int


def with_slots(value: Any, batches: list[Batch]) -> Any:
    """An argument with every batch in it taken out, to the end of a list, and its place marked."""
    if isinstance(value, Batch):
        batches.append(value)
        return Slot(len(batches) - 1)
    return _mapped(value, lambda item: with_slots(item, batches))


def filled(value: Any, parts: Sequence[Any]) -> Any:
    """The argument with something in the marked places."""
    return parts[value.number] if isinstance(value, Slot) else _mapped(value, lambda item: filled(item, parts))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(change(item) for item in value)
    return {key: change(item) for key, item in value.items()} if type(value) is dict else value


def _part(arrays: Arrays, lengths: Arrays, division: Division, part: int) -> Packed:
    """The sequences of a part; `lengths` are those between boundaries."""
    runs, stretches = division.runs[part], division.stretches(part)
    found: Arrays = {}
    for label, array in arrays.items():
        kind, _, name = label.partition("/")
        if kind in ("tokens", "token"):
            found[label] = _cut(array, stretches)
        elif kind == "sequence":
            found[label] = _cut(array, runs)
        elif kind in ("offsets", "bounds"):
            found[label] = np.concatenate([np.zeros(1, dtype=array.dtype), np.cumsum(_cut(lengths[label], runs))])
        elif kind == "values":
            of = arrays[f"bounds/{name.partition(MARK)[0]}"]
            found[label] = _cut(array, [(int(of[a]), int(of[b])) for a, b in runs])
    return Packed(found)


def _cut(array: np.ndarray, runs: Runs) -> np.ndarray:
    """Stretches of an array, one after the other: copying them is faster than gathering by index."""
    if len(runs) == 1:
        return array[runs[0][0] : runs[0][1]]
    return np.concatenate([array[a:b] for a, b in runs]) if runs else array[:0]


# --- together ------------------------------------------------------------------------------------------------------------


def join_parts(results: Sequence[Any], division: Division) -> Any:
    """Columns in the order of the whole batch; of anything else that of the first part."""
    first = results[0]
    if isinstance(first, Tensor):
        return _joined(results, division)
    if type(first) is dict:
        return {key: join_parts([result[key] for result in results], division) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(join_parts(items, division) for items in zip(*results, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return replace(first, **{n: join_parts([getattr(r, n) for r in results], division) for n in names})
    return first


def _joined(columns: Sequence[Tensor], division: Division) -> Tensor:
    parts = range(division.num_parts)
    for places in ([division.stretches(part) for part in parts], division.runs):
        counts = [sum(b - a for a, b in place) for place in places]
        if [column.shape[0] for column in columns] == counts:
            break
    else:
        sizes = [column.shape[0] for column in columns]
        raise ValueError(f"columns of {sizes} rows are neither one a token nor one a sequence of the parts")
    # A part without a token may not know the type of a column.
    like = next((column for column, count in zip(columns, counts, strict=True) if count), columns[0])
    whole = torch.empty(sum(counts), *like.shape[1:], dtype=like.dtype)
    for column, place in zip(columns, places, strict=True):
        at = 0
        for start, stop in place:
            whole[start:stop] = column[at : at + stop - start]
            at += stop - start
    return whole
