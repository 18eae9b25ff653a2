"""A batch in the parts that its division (`division.py`) says, the rest of a call's arguments, and results put together: the
arithmetic behind the marks of `core/dispatch.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.serialization import (
    DTYPE_SEPARATOR,
    Arrays,
    PackedArrays,
    array_and_dtype,
    array_to_tensor,
    batch_to_arrays,
    decode,
    pack_mask,
    tensor_to_array,
)
from burnish.training.packing import ATTENTION_COST, karmarkar_karp
from burnish.training.parallel.ranks import ORIGINAL_INDEX

# --- Which sequences of a batch go to which rank: about the same work for all.
#
# A batch is divided by whole groups, since the samples of a prompt share its work. Nothing depends on how: token weights are
# fixed on the whole mini-batch before it is divided.

MAX_BALANCED_PARTS = 64
"""Up to so many parts are balanced by the better method, whose time grows with their number."""
Ranges = list[tuple[int, int]]
"""Sequences [start, stop), one after the other."""


@dataclass(frozen=True)
class ShardPlan:
    """Which sequences of a batch each part has, in rising order."""

    runs: list[Ranges]
    offsets: np.ndarray  # [S+1] of the whole batch

    @property
    def num_parts(self) -> int:
        return len(self.runs)

    def stretches(self, part: int) -> Ranges:
        """The same as tokens [start, stop)."""
        runs, ends = self.stretches_in_order[0], self.run_ends
        return runs[ends[part] : ends[part + 1]]

    @cached_property
    def run_ends(self) -> list[int]:
        """How many runs the parts before each have, and all."""
        return [0, *accumulate(len(runs) for runs in self.runs)]

    @cached_property
    def in_order(self) -> tuple[Ranges, list[int]]:
        """The runs of all parts one after the other, and how many sequences the parts before each have."""
        runs = [run for part in self.runs for run in part]
        return runs, self._ends(runs)

    @cached_property
    def stretches_in_order(self) -> tuple[Ranges, list[int]]:
        """The same of tokens."""
        bounds = np.array(self.in_order[0], dtype=np.int64).reshape(-1, 2)
        stretches: Ranges = list(zip(*self.offsets[bounds].T.tolist(), strict=True)) if len(bounds) else []
        return stretches, self._ends(stretches)

    def _ends(self, runs: Ranges) -> list[int]:
        sizes = [0, *accumulate(stop - start for start, stop in runs)]
        return [sizes[k] for k in self.run_ends]


def plan_shards(batch: Batch, num_parts: int, stretches: int = 1, attention_cost: float = ATTENTION_COST) -> ShardPlan:
    """Every sequence once, about the same work for all; a part may be empty.

    A sequence of L tokens costs L + attention_cost L^2; what a group was given to begin with counts once. With several
    `stretches` the work is about the same in each of so many stretches of groups: those that mini-batches will be made of.
    """
    offsets = batch.offsets.cpu().numpy()
    lengths = np.diff(offsets)
    units = _units(batch, len(lengths))
    costs = _unit_costs(batch, units, lengths.astype(np.float64), offsets, attention_cost)
    held, given = [0.0] * num_parts, [list[int]() for _ in range(num_parts)]
    count = max(1, min(stretches, len(units)))
    for k in range(count):
        first, last = k * len(units) // count, (k + 1) * len(units) // count
        own = costs[first:last]
        parts = karmarkar_karp(own, num_parts) if num_parts <= MAX_BALANCED_PARTS else greedy_partition(own, num_parts)
        weights = [sum(own[item] for item in part) for part in parts]
        # The heaviest of this stretch to whoever has least of those before.
        for part, rank in zip(_rising_order(weights)[::-1], _rising_order(held), strict=True):
            given[rank] += [first + item for item in parts[part]]
            held[rank] += weights[part]
    return ShardPlan([_merge_ranges([run for k in part for run in units[k]]) for part in given], offsets)


def _rising_order(amounts: Sequence[float]) -> list[int]:
    """Indices from the smallest amount up."""
    return sorted(range(len(amounts)), key=lambda i: amounts[i])


def plan_from_owners(owners: np.ndarray, num_parts: int, offsets: np.ndarray) -> ShardPlan:
    """The division in which every sequence goes to the part that `owners` [S] says."""
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    stops = np.append(starts[1:], len(owners))
    runs: list[Ranges] = [[] for _ in range(num_parts)]
    for start, stop, owner in zip(starts.tolist(), stops.tolist(), owners[starts].tolist(), strict=True):
        runs[owner].append((start, stop))
    return ShardPlan(runs, offsets)


def greedy_partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Items from the heaviest down, each to the part that has least (Graham, 1969): parts differ by at most one item's cost."""
    heap = [(0.0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        held, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (held + costs[item], part))
    return [sorted(part) for part in parts]


def _units(batch: Batch, num_sequences: int) -> list[Ranges]:
    """The groups as runs of sequences; a sequence of its own where there are none."""
    if "group_ids" not in batch.sequence or not num_sequences:
        return [[(i, i + 1)] for i in range(num_sequences)]
    groups = batch.sequence["group_ids"].cpu().numpy()
    starts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
    stops = np.append(starts[1:], num_sequences).tolist()
    units: dict[int, Ranges] = {}
    for start, stop, group in zip(starts.tolist(), stops, groups[starts].tolist(), strict=True):
        units.setdefault(group, []).append((start, stop))
    return list(units.values())


def _unit_costs(
    batch: Batch, units: list[Ranges], lengths: np.ndarray, offsets: np.ndarray, attention_cost: float
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


def _merge_ranges(runs: Ranges) -> Ranges:
    """Neighbours made one."""
    joined: Ranges = []
    for start, stop in sorted(runs):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


# --- apart ---------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ShardedBatch:
    """A batch in parts that can be sent: made once, however many calls are given it."""

    division: ShardPlan
    parts: list[Any]
    stored: dict[Any, Any] = field(default_factory=dict)
    """What stands for parts in a store; of whoever put them there."""


def shard_batch(batch: Batch, division: ShardPlan) -> ShardedBatch:
    """A batch in parts that hold all of it."""
    arrays = with_original_index(batch_to_arrays(batch, batch.tokens.dtype), batch.num_sequences)
    return ShardedBatch(division, list(shards_of(arrays, division)))


def with_original_index(arrays: Arrays, num_sequences: int) -> Arrays:
    """The arrays with the number of every sequence, by which order can be restored."""
    return arrays | {f"sequence/{ORIGINAL_INDEX}": np.arange(num_sequences)}


@dataclass(frozen=True)
class Placeholder:
    """Where in the arguments of a call a part of a batch goes."""

    number: int


def extract_batches(value: Any, batches: list[Batch]) -> Any:
    """An argument with every batch in it taken out, to the end of a list, and its place marked."""
    if isinstance(value, Batch):
        batches.append(value)
        return Placeholder(len(batches) - 1)
    return _map_items(value, lambda item: extract_batches(item, batches))


def fill_placeholders(value: Any, parts: Sequence[Any]) -> Any:
    """The argument with something in the marked places."""
    return (
        parts[value.number]
        if isinstance(value, Placeholder)
        else _map_items(value, lambda item: fill_placeholders(item, parts))
    )


def _map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(change(item) for item in value)
    return {key: change(item) for key, item in value.items()} if type(value) is dict else value


def shards_of(arrays: Arrays, division: ShardPlan) -> list[PackedArrays]:
    """What each part has of the columns of a batch.

    A column is put in the order of the parts at once, and each has a piece of that: few large copies are faster than many small.
    """
    found: list[Arrays] = [{} for _ in division.runs]
    runs, ends = division.in_order
    stretches, token_ends = division.stretches_in_order
    for label, array in arrays.items():
        kind, _, name = label.partition("/")
        if kind in ("tokens", "token"):
            narrow = np.int32 if kind == "tokens" else array.dtype  # `core.wire.TOKENS`
            pieces = _take_ranges(array, stretches, token_ends, narrow)
        elif kind == "sequence":
            pieces = _take_ranges(array, runs, ends, array.dtype)
        elif kind in ("offsets", "bounds"):
            lengths = _take_ranges(np.diff(array), runs, ends, array.dtype)
            pieces = [np.concatenate([array[:1] * 0, np.cumsum(own)]) for own in lengths]
        else:  # the values between bounds
            of = arrays[f"bounds/{name.partition(DTYPE_SEPARATOR)[0]}"]
            inner = [(int(of[a]), int(of[b])) for a, b in runs]
            sizes = np.cumsum([0, *(b - a for a, b in inner)])
            pieces = _take_ranges(array, inner, sizes[division.run_ends].tolist(), array.dtype)
        is_mask = kind == "token" and array.dtype == bool and array.ndim == 1
        for part, piece in zip(found, pieces, strict=True):
            name, content = pack_mask(label, piece) if is_mask else (label, piece)
            part[name] = content
    return [PackedArrays(part) for part in found]


def _take_ranges(array: np.ndarray, stretches: Ranges, ends: Sequence[int], dtype: Any) -> list[np.ndarray]:
    """Stretches of an array, one after the other, as another type, in pieces that end at `ends` (the first of which is 0)."""
    parts = [array[a:b] for a, b in stretches] or [array[:0]]
    whole = np.concatenate(parts, dtype=dtype, casting="same_kind")
    return [whole[a:b] for a, b in zip(ends, ends[1:], strict=False)]


# --- together ------------------------------------------------------------------------------------------------------------


def collect_results(results: Sequence[Any], division: ShardPlan) -> Any:
    """Columns in the order of the whole batch; of anything else that of the first part.

    Results may be as they travelled: then columns are copied once, from where they lie to their places.
    """
    first = results[0]
    if isinstance(first, (Tensor, PackedArrays)):
        return _collect_column(results, division)
    if type(first) is dict:
        return {key: collect_results([result[key] for result in results], division) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(collect_results(items, division) for items in zip(*results, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first)]
        return replace(first, **{n: collect_results([getattr(r, n) for r in results], division) for n in names})
    return first


def _collect_column(columns: Sequence[Tensor | PackedArrays], division: ShardPlan) -> Tensor:
    if division.num_parts == 1:
        whole: Tensor = decode(columns[0])
        return whole
    arrays, kinds = zip(*(_as_array(column) for column in columns), strict=True)
    sizes = [array.shape[0] for array in arrays]
    for runs, ends in (division.stretches_in_order, division.in_order):  # noqa: B007 (used behind the loop)
        if sizes == np.diff(ends).tolist():
            break
    else:
        raise ValueError(f"columns of {sizes} rows are neither one a token nor one a sequence of the parts")
    # A part without a token may not know the type of a column.
    like = next((k for k, size in enumerate(sizes) if size), 0)
    # Memory of numpy's, which asks for large pages: to get tens of megabytes in small ones takes longer than to fill them.
    target = np.empty((sum(sizes), *arrays[like].shape[1:]), dtype=arrays[like].dtype)
    counts = division.run_ends
    for part, source in enumerate(arrays):
        at = 0
        for start, stop in runs[counts[part] : counts[part + 1]]:
            target[start:stop] = source[at : at + stop - start]
            at += stop - start
    return array_to_tensor(target, kinds[like])


def _as_array(column: Tensor | PackedArrays) -> tuple[np.ndarray, torch.dtype | None]:
    """A column where it is, and its type."""
    return (tensor_to_array(column), column.dtype) if isinstance(column, Tensor) else array_and_dtype(column)
