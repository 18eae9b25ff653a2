"""Dispatch and collect: divides a batch over the ranks of a worker group, and joins their results (`core/dispatch.py`).

A batch is sharded by whole groups, because the samples of a prompt share its computation. The numbers do not depend on the
plan: token weights are fixed on the whole mini-batch before it is sharded.
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
from burnish.core.pictures import PICTURE_KEYS, PICTURE_LABEL
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

MAX_BALANCED_PARTS = 64
"""Most shards that are balanced by the better method. At 500 ranks it would cost the driver 90 ms a step (`bench/controller_sim.py`)."""
Ranges = list[tuple[int, int]]
"""Ranges [start, stop) of sequences or tokens."""


# --- Which rank gets which sequences -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardPlan:
    """The sequences of each shard of a batch, as ascending ranges."""

    sequences: list[Ranges]
    offsets: np.ndarray  # [S+1] of the whole batch

    @property
    def num_parts(self) -> int:
        return len(self.sequences)

    def token_ranges(self, part: int) -> Ranges:
        """Token ranges of one shard."""
        ranges, ends = self.token_ranges_in_order[0], self.range_ends
        return ranges[ends[part] : ends[part + 1]]

    @cached_property
    def range_ends(self) -> list[int]:
        """[num_parts + 1] number of ranges in all shards before each, and in all."""
        return [0, *accumulate(len(ranges) for ranges in self.sequences)]

    @cached_property
    def sequence_ranges(self) -> tuple[Ranges, list[int]]:
        """Sequence ranges of all shards in order, and [num_parts + 1] number of sequences before each shard."""
        ranges = [one for part in self.sequences for one in part]
        return ranges, self._ends(ranges)

    @cached_property
    def token_ranges_in_order(self) -> tuple[Ranges, list[int]]:
        """Token ranges of all shards in order, and [num_parts + 1] number of tokens before each shard."""
        bounds = np.array(self.sequence_ranges[0], dtype=np.int64).reshape(-1, 2)
        ranges: Ranges = list(zip(*self.offsets[bounds].T.tolist(), strict=True)) if len(bounds) else []
        return ranges, self._ends(ranges)

    def _ends(self, ranges: Ranges) -> list[int]:
        sizes = [0, *accumulate(stop - start for start, stop in ranges)]
        return [sizes[k] for k in self.range_ends]


def plan_shards(
    batch: Batch, num_parts: int, num_mini_batches: int = 1, attention_cost: float = ATTENTION_COST
) -> ShardPlan:
    """Divide the sequences into shards of about equal work; a shard may be empty.

    A sequence of L tokens costs L + attention_cost L^2, and a group's prompt counts once. With `num_mini_batches` > 1 the work is
    balanced within each of so many consecutive parts of the batch, from which mini-batches will be made.
    """
    offsets = batch.offsets.cpu().numpy()
    lengths = np.diff(offsets)
    units = _units(batch, len(lengths))
    costs = _unit_costs(batch, units, lengths.astype(np.float64), offsets, attention_cost)
    loads, assigned = [0.0] * num_parts, [list[int]() for _ in range(num_parts)]
    count = max(1, min(num_mini_batches, len(units)))
    for k in range(count):
        first, last = k * len(units) // count, (k + 1) * len(units) // count
        own = costs[first:last]
        parts = karmarkar_karp(own, num_parts) if num_parts <= MAX_BALANCED_PARTS else greedy_partition(own, num_parts)
        weights = [sum(own[item] for item in part) for part in parts]
        # The heaviest shard of this mini-batch goes to the rank with the least work so far.
        for part, rank in zip(_rising_order(weights)[::-1], _rising_order(loads), strict=True):
            assigned[rank] += [first + item for item in parts[part]]
            loads[rank] += weights[part]
    return ShardPlan([_merge_ranges([one for k in part for one in units[k]]) for part in assigned], offsets)


def _rising_order(amounts: Sequence[float]) -> list[int]:
    """Indices in ascending order of their amounts."""
    return sorted(range(len(amounts)), key=lambda i: amounts[i])


def plan_from_owners(owners: np.ndarray, num_parts: int, offsets: np.ndarray) -> ShardPlan:
    """The plan that gives every sequence to the shard in `owners` [S]."""
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    stops = np.append(starts[1:], len(owners))
    ranges: list[Ranges] = [[] for _ in range(num_parts)]
    for start, stop, owner in zip(starts.tolist(), stops.tolist(), owners[starts].tolist(), strict=True):
        ranges[owner].append((start, stop))
    return ShardPlan(ranges, offsets)


def greedy_partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Assign items, heaviest first, to the lightest part (Graham, 1969). Parts differ by at most one item's cost."""
    heap = [(0.0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (load + costs[item], part))
    return [sorted(part) for part in parts]


def _units(batch: Batch, num_sequences: int) -> list[Ranges]:
    """Sequence ranges of each group; of each sequence if the batch has no groups."""
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
    starts, stops = np.array([one for ranges in units for one in ranges], dtype=np.int64).reshape(-1, 2).T
    of = np.repeat(np.arange(len(units)), [len(ranges) for ranges in units])
    totals: np.ndarray = np.bincount(of, weights=before[stops] - before[starts], minlength=len(units))
    if "action_mask" in batch.token:  # the prompt ends at the first token that the group's first sample wrote
        mask, counts = (
            batch.token["action_mask"].cpu().numpy(),
            np.bincount(of, weights=stops - starts, minlength=len(units)),
        )
        firsts = np.array([ranges[0][0] for ranges in units], dtype=np.int64)
        bounds = zip(offsets[firsts].tolist(), offsets[firsts + 1].tolist(), strict=True)
        prompts = np.array([mask[a:b].argmax() for a, b in bounds], dtype=np.float64)
        totals = totals - (counts - 1) * (prompts + attention_cost * prompts**2)
    found: list[float] = totals.tolist()
    return found


def _merge_ranges(ranges: Ranges) -> Ranges:
    """Sort ranges, and merge adjacent ones."""
    joined: Ranges = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


# --- Dispatch: arguments -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ShardedBatch:
    """A batch in shards that can be sent. It is made once, and used for every call with this batch."""

    plan: ShardPlan
    parts: list[Any]
    stored: dict[Any, Any] = field(default_factory=dict)
    """References to shards in an object store, kept by the backend."""


def shard_batch(batch: Batch, plan: ShardPlan) -> ShardedBatch:
    """Divide a batch by a plan."""
    arrays = with_original_index(batch_to_arrays(batch, batch.tokens.dtype), batch.num_sequences)
    return ShardedBatch(plan, list(shards_of(arrays, plan)))


def with_original_index(arrays: Arrays, num_sequences: int) -> Arrays:
    """The arrays with the index of every sequence, which restores the order after a gather."""
    return arrays | {f"sequence/{ORIGINAL_INDEX}": np.arange(num_sequences)}


@dataclass(frozen=True)
class Placeholder:
    """Marks where a shard goes in the arguments of a call."""

    number: int


def extract_batches(value: Any, batches: list[Batch]) -> Any:
    """Replace every batch in an argument by a placeholder, and append it to `batches`."""
    if isinstance(value, Batch):
        batches.append(value)
        return Placeholder(len(batches) - 1)
    return _map_items(value, lambda item: extract_batches(item, batches))


def fill_placeholders(value: Any, parts: Sequence[Any]) -> Any:
    """Replace the placeholders in an argument by `parts`."""
    return (
        parts[value.number]
        if isinstance(value, Placeholder)
        else _map_items(value, lambda item: fill_placeholders(item, parts))
    )


def _map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(change(item) for item in value)
    return {key: change(item) for key, item in value.items()} if type(value) is dict else value


def shards_of(arrays: Arrays, plan: ShardPlan) -> list[PackedArrays]:
    """The columns of each shard.

    A column is reordered once, and each shard is a slice of it: one large copy is faster than many small ones.
    """
    found: list[Arrays] = [{} for _ in plan.sequences]
    ranges, ends = plan.sequence_ranges
    token_ranges, token_ends = plan.token_ranges_in_order
    for label, array in arrays.items():
        kind, _, name = label.partition("/")
        if label.startswith(PICTURE_LABEL):
            continue
        if kind in ("tokens", "token"):
            narrow = np.int32 if kind == "tokens" else array.dtype  # as `core/serialization.py` sends tokens
            slices = _take_ranges(array, token_ranges, token_ends, narrow)
        elif kind == "sequence":
            slices = _take_ranges(array, ranges, ends, array.dtype)
        elif kind in ("offsets", "bounds"):
            lengths = _take_ranges(np.diff(array), ranges, ends, array.dtype)
            slices = [np.concatenate([array[:1] * 0, np.cumsum(own)]) for own in lengths]
        else:  # the values of a ragged column
            of = arrays[f"bounds/{name.partition(DTYPE_SEPARATOR)[0]}"]
            inner = [(int(of[a]), int(of[b])) for a, b in ranges]
            sizes = np.cumsum([0, *(b - a for a, b in inner)])
            slices = _take_ranges(array, inner, sizes[plan.range_ends].tolist(), array.dtype)
        is_mask = kind == "token" and array.dtype == bool and array.ndim == 1
        for part, column in zip(found, slices, strict=True):
            name, content = pack_mask(label, column) if is_mask else (label, column)
            part[name] = content
    for label in [label for label in arrays if label.startswith(PICTURE_LABEL)]:
        key = int(label.split("/")[1])
        for part in found:
            if (part[f"values/{PICTURE_KEYS}"] == key).any():  # a shard gets the images that its sequences read
                part[label] = arrays[label]
    return [PackedArrays(part) for part in found]


def _take_ranges(array: np.ndarray, ranges: Ranges, ends: Sequence[int], dtype: Any) -> list[np.ndarray]:
    """Concatenate ranges of an array, convert them to a type, and split them at `ends` (the first of which is 0)."""
    parts = [array[a:b] for a, b in ranges] or [array[:0]]
    whole = np.concatenate(parts, dtype=dtype, casting="same_kind")
    return [whole[a:b] for a, b in zip(ends, ends[1:], strict=False)]


# --- Collect: results --------------------------------------------------------------------------------------------------


def collect_results(results: Sequence[Any], plan: ShardPlan) -> Any:
    """Join the results of all shards: columns in the order of the whole batch, anything else from the first shard.

    Results may still be serialised; columns are then copied only once, into the joined column.
    """
    first = results[0]
    if isinstance(first, (Tensor, PackedArrays)):
        return _collect_column(results, plan)
    if type(first) is dict:
        return {key: collect_results([result[key] for result in results], plan) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(collect_results(items, plan) for items in zip(*results, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first)]
        return replace(first, **{n: collect_results([getattr(r, n) for r in results], plan) for n in names})
    return first


def _collect_column(columns: Sequence[Tensor | PackedArrays], plan: ShardPlan) -> Tensor:
    if plan.num_parts == 1:
        whole: Tensor = decode(columns[0])
        return whole
    arrays, kinds = zip(*(_as_array(column) for column in columns), strict=True)
    sizes = [array.shape[0] for array in arrays]
    for ranges, ends in (plan.token_ranges_in_order, plan.sequence_ranges):  # noqa: B007 (used behind the loop)
        if sizes == np.diff(ends).tolist():
            break
    else:
        raise ValueError(f"columns of {sizes} rows have neither one row per token nor one per sequence of the shards")
    # An empty shard may have a column of the wrong type.
    like = next((k for k, size in enumerate(sizes) if size), 0)
    # numpy allocates huge pages: page faults of tens of megabytes in small pages take longer than the copy.
    target = np.empty((sum(sizes), *arrays[like].shape[1:]), dtype=arrays[like].dtype)
    counts = plan.range_ends
    for part, source in enumerate(arrays):
        at = 0
        for start, stop in ranges[counts[part] : counts[part + 1]]:
            target[start:stop] = source[at : at + stop - start]
            at += stop - start
    return array_to_tensor(target, kinds[like])


def _as_array(column: Tensor | PackedArrays) -> tuple[np.ndarray, torch.dtype | None]:
    """A column without a copy, and its type."""
    return (tensor_to_array(column), column.dtype) if isinstance(column, Tensor) else array_and_dtype(column)
