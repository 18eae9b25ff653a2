"""Batches that workers keep: what a rank was sent once, or computed itself, is named afterwards and not sent again.

The first batch of a step is sent in parts, one a rank, and kept there, together with the columns that ranks compute for it
(log-probs, values). Mini-batches are selections of it with some columns added: of those only the numbers of the sequences and
the new columns travel. `Base` is the controller's side of it, `Keeper` the worker's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.serialization import (
    Arrays,
    PackedArrays,
    arrays_to_columns,
    batch_from_columns,
    batch_to_arrays,
    columns_to_arrays,
    decode,
)
from burnish.distributed.batch_dispatch import ShardedBatch, ShardPlan, plan_from_owners, shards_of, with_original_index

ROW_LABEL, STACK_LABEL = "sequence/row", "sequence/stack"
"""The column with the number that a chosen sequence has among those that its rank keeps; several columns in one array."""
MAX_IMBALANCE = 1.25
"""Times the mean work of a rank that a rank may have in a selection of what they keep; past it everything is sent anew."""


@dataclass(frozen=True)
class NewShard:
    """A part of a batch that a rank shall keep; `number` names what it computes of it."""

    key: int
    number: int
    packed: PackedArrays


@dataclass(frozen=True)
class ResidentShardRef:
    """The part that a rank keeps."""

    key: int
    number: int


@dataclass(frozen=True)
class ShardSelection:
    """Sequences of the part that a rank keeps, under names that columns have there, and columns that are new."""

    key: int
    names: dict[str, str]
    """The label of a column to that of what is kept."""
    packed: PackedArrays
    stack: tuple[tuple[str, str], ...]
    """Labels and types of the columns of sequences that travel side by side in one array, `STACK`; `ROW` says which sequences."""


# --- the worker's side ---------------------------------------------------------------------------------------------------


class ResidentShard:
    """What one rank keeps: a part of one batch, and columns of it."""

    def __init__(self) -> None:
        self._key = -1
        self._batch: Batch | None = None
        self._columns: dict[str, Tensor] = {}

    def open(self, part: Any) -> Any:
        """The batch that a part of a message stands for."""
        if not isinstance(part, (NewShard, ResidentShardRef, ShardSelection)):
            return decode(part)
        if isinstance(part, NewShard):
            self._columns = arrays_to_columns(part.packed.arrays)
            self._key, self._batch = part.key, batch_from_columns(self._columns)
        if part.key != self._key or self._batch is None:
            raise RuntimeError(f"this rank keeps batch {self._key}, and was asked for {part.key}")
        return self._chosen(part) if isinstance(part, ShardSelection) else self._batch

    def keep(self, parts: Sequence[Any], result: Any) -> None:
        """Keep the columns that a call with these parts gave, if it was given what is kept."""
        if parts and isinstance(parts[0], (NewShard, ResidentShardRef)):
            for label, column in named_columns(result):
                self._columns[f"{parts[0].number}/{label}"] = column.detach().cpu()

    def _chosen(self, part: ShardSelection) -> Batch:
        assert self._batch is not None
        new = arrays_to_columns(unstack_columns(part))
        token = {label: self._columns[name] for label, name in part.names.items() if label.startswith("token/")}
        sequence = {label: self._columns[name] for label, name in part.names.items() if label.startswith("sequence/")}
        rows = new.pop(ROW_LABEL)
        held = Batch(self._batch.tokens, self._batch.offsets, token, sequence).select(rows)
        return batch_from_columns({"tokens": held.tokens, "offsets": held.offsets} | held.token | held.sequence | new)


def stack_columns(arrays: Arrays) -> tuple[Arrays, tuple[tuple[str, str], ...]]:
    """Columns of sequences whose values have eight bytes as one array: a thousand small ones take longer than what is in them."""
    small = [label for label, a in arrays.items() if label.startswith("sequence/") and a.ndim == 1 and a.itemsize == 8]
    together = np.stack([arrays[label].view(np.int64) for label in small], axis=1)
    others = {label: array for label, array in arrays.items() if label not in small}
    return others | {STACK_LABEL: together}, tuple((label, arrays[label].dtype.str) for label in small)


def unstack_columns(part: ShardSelection) -> Arrays:
    """The arrays of a part, each by itself."""
    arrays = dict(part.packed.arrays)
    together = np.ascontiguousarray(arrays.pop(STACK_LABEL).T)
    return arrays | {label: together[k].view(dtype) for k, (label, dtype) in enumerate(part.stack)}


def named_columns(result: Any) -> Iterator[tuple[str, Tensor]]:
    """The columns of a result that is one or a dictionary of them, and what they are called."""
    if isinstance(result, Tensor):
        yield "", result
    elif isinstance(result, dict):
        yield from ((str(name), column) for name, column in result.items() if isinstance(column, Tensor))


# --- the controller's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResidentColumn:
    """A column of the whole batch that ranks have parts of, as it was then."""

    label: str
    column: Tensor
    version: int
    """torch's count of changes in place: a column that was changed since is not what ranks have."""

    @staticmethod
    def of(label: str, column: Tensor) -> ResidentColumn:
        return ResidentColumn(label, column, column._version)


class ResidentBatch:
    """The batch that the ranks of a group keep in parts."""

    def __init__(self, batch: Batch, division: ShardPlan, key: int) -> None:
        self.batch, self.division, self.key = batch, division, key
        self._calls = 0
        labelled = {f"token/{n}": c for n, c in batch.token.items()}
        labelled |= {f"sequence/{n}": c for n, c in batch.sequence.items()}
        self._held = {id(column): ResidentColumn.of(label, column) for label, column in labelled.items()}
        self._owner, self._row = _owner_and_row(division)

    def first_parts(self) -> ShardedBatch:
        """What is sent first: everything, to be kept."""
        arrays, number = (
            with_original_index(batch_to_arrays(self.batch, self.batch.tokens.dtype), self.batch.num_sequences),
            self._next(),
        )
        return ShardedBatch(
            self.division, [NewShard(self.key, number, part) for part in shards_of(arrays, self.division)]
        )

    def parts_again(self) -> ShardedBatch:
        """What is sent of the same batch afterwards."""
        number = self._next()
        return ShardedBatch(self.division, [ResidentShardRef(self.key, number)] * self.division.num_parts)

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def keeps(self, sent: ShardedBatch, result: Any) -> None:
        """The ranks keep their parts of what a call gave, if it was given what they keep."""
        part = sent.parts[0]
        if isinstance(part, (NewShard, ResidentShardRef)) and part.key == self.key:
            for label, column in named_columns(result):
                self._held[id(column)] = ResidentColumn.of(f"{part.number}/{label}", column)

    def chosen(self, batch: Batch) -> ShardedBatch | None:
        """The parts of a selection of this batch; None of any other batch, or where ranks would have uneven work."""
        found = self._traced(batch)
        if found is None:
            return None
        index, names = found
        division = plan_from_owners(self._owner[index], self.division.num_parts, batch.offsets.cpu().numpy())
        if _is_imbalanced(batch, division):
            return None
        new = {
            f"{kind}/{name}": column
            for kind, columns in (("token", batch.token), ("sequence", batch.sequence))
            for name, column in columns.items()
            if f"{kind}/{name}" not in names
        }
        arrays = with_original_index(columns_to_arrays(new), batch.num_sequences)
        arrays, stack = stack_columns(arrays | {ROW_LABEL: self._row[index]})
        return ShardedBatch(
            division, [ShardSelection(self.key, names, part, stack) for part in shards_of(arrays, division)]
        )

    def _traced(self, batch: Batch) -> tuple[np.ndarray, dict[str, str]] | None:
        """Which sequences of the base a batch's are, and which of its columns are taken of kept ones."""
        if batch.ragged:
            return None
        index: Tensor | None = None
        token, sequence = batch.token, batch.sequence
        while not self._is_base(batch):
            origin = batch.origin
            if origin is None:
                return None
            index = origin.index if index is None else origin.index[index]
            token = _source_columns(token, origin.token, origin.batch.token)
            sequence = _source_columns(sequence, origin.sequence, origin.batch.sequence)
            batch = origin.batch
        if index is None:
            index = torch.arange(batch.num_sequences)
        names = {f"token/{name}": label for name, column in token.items() if (label := self._label(column))}
        names |= {f"sequence/{name}": label for name, column in sequence.items() if (label := self._label(column))}
        return index.cpu().numpy(), names

    def _is_base(self, batch: Batch) -> bool:
        return batch.tokens is self.batch.tokens and batch.offsets is self.batch.offsets

    def _label(self, column: Tensor) -> str | None:
        """What ranks call a column of the whole batch, if they have it."""
        held = self._held.get(id(column))
        if held is not None and held.column is column:
            return held.label if column._version == held.version else None
        if column.dtype == torch.bool:  # a mask that begins as a copy of another
            for held in self._held.values():
                same = held.column.dtype == torch.bool and held.column._version == held.version
                if same and _masks_equal(held.column, column):
                    self._held[id(column)] = ResidentColumn.of(held.label, column)
                    return held.label
        return None


def _masks_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two masks are, eight bytes at a time."""
    words, offsets = one.numel() // 8 * 8, (one.storage_offset(), other.storage_offset())
    if one.shape != other.shape or any(offset % 8 for offset in offsets):
        return torch.equal(one, other)
    head = torch.equal(one[:words].view(torch.int64), other[:words].view(torch.int64))
    return head and torch.equal(one[words:], other[words:])


def _source_columns(
    columns: Mapping[str, Tensor], taken: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The columns that a selection's are of, as far as they are still those that were taken and nobody changed them."""
    # A column that is not copied shares the count of changes with what it was taken of.
    return {
        name: whole[name]
        for name, column in columns.items()
        if taken.get(name) is column and (column._version == 0 or column._base is not None)
    }


def _owner_and_row(division: ShardPlan) -> tuple[np.ndarray, np.ndarray]:
    """[S] the part of every sequence, and its number there."""
    runs, ends = division.in_order
    counts = np.diff(ends)
    owner, row = np.empty(ends[-1], dtype=np.int64), np.empty(ends[-1], dtype=np.int64)
    starts, stops = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    before = np.cumsum(stops - starts) - (stops - starts)
    order = np.repeat(starts - before, stops - starts) + np.arange(ends[-1])  # the sequences as the parts have them
    owner[order] = np.repeat(np.arange(division.num_parts), counts)
    row[order] = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
    return owner, row


def _is_imbalanced(batch: Batch, division: ShardPlan) -> bool:
    """Whether a rank has much more work than the mean, by more than a group: those are never divided."""
    totals = np.diff(division.stretches_in_order[1])
    mean, most = totals.mean(), totals.max()
    if most <= MAX_IMBALANCE * mean:
        return False
    lengths = np.diff(division.offsets)
    groups = batch.sequence["group_ids"].cpu().numpy() if "group_ids" in batch.sequence else np.arange(len(lengths))
    sizes = np.bincount(np.unique(groups, return_inverse=True)[1], weights=lengths)
    return bool(most > mean + sizes.max())
