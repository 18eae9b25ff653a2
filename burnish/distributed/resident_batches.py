"""Batches that stay on the workers: a shard that a rank has received, and what it computed for it, are not sent again.

The first batch of a step is sent in shards, one per rank, and stays there, together with the columns that the ranks compute for it
(log-probs, values). Mini-batches are selections of it with some new columns: only sequence numbers and the new columns are sent.
`ResidentBatch` is the driver's side, `ResidentShard` the worker's.

With 1,000 workers and 65,536 samples a step sends 72 MB for the first pass and 2 MB for four updates (`bench/controller_sim.py`).
Without resident shards every pass and update would send its columns again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.pictures import PICTURE_COLUMNS, pictures_from_arrays
from burnish.core.serialization import (
    PackedArrays,
    arrays_to_columns,
    batch_from_columns,
    batch_to_arrays,
    columns_to_arrays,
    decode,
)
from burnish.distributed.batch_dispatch import ShardedBatch, ShardPlan, plan_from_owners, shards_of, with_original_index

ROW_LABEL = "sequence/row"
"""Column with the row of a selected sequence in the shard of its rank."""
MAX_IMBALANCE = 1.25
"""Most tokens that a rank may have in a selection, relative to the mean. Above it the selection is sent as a new batch."""


@dataclass(frozen=True)
class NewShard:
    """A shard that the rank must keep; `number` names the columns that this call computes."""

    key: int
    number: int
    packed: PackedArrays


@dataclass(frozen=True)
class ResidentShardRef:
    """The shard that the rank already has."""

    key: int
    number: int


@dataclass(frozen=True)
class ShardSelection:
    """A selection of the sequences in the shard that the rank has, with new columns."""

    key: int
    names: dict[str, str]
    """Labels of the selection's columns to those of resident columns."""
    packed: PackedArrays
    """New columns; `ROW_LABEL` says which sequences are selected."""


# --- The worker's side ---------------------------------------------------------------------------------------------------


class ResidentShard:
    """The shard of one batch that a rank has, with the columns it computed for it."""

    def __init__(self) -> None:
        self._key = -1
        self._batch: Batch | None = None
        self._columns: dict[str, Tensor] = {}

    def open(self, part: Any) -> Any:
        """The batch that a part of a message refers to."""
        if not isinstance(part, (NewShard, ResidentShardRef, ShardSelection)):
            return decode(part)
        if isinstance(part, NewShard):
            self._columns = arrays_to_columns(part.packed.arrays)
            pictures = pictures_from_arrays(part.packed.arrays)
            self._key, self._batch = part.key, batch_from_columns(self._columns, pictures)
        if part.key != self._key or self._batch is None:
            raise RuntimeError(f"this rank has batch {self._key} and was asked for {part.key}")
        return self._select(part) if isinstance(part, ShardSelection) else self._batch

    def keep(self, parts: Sequence[Any], result: Any) -> None:
        """Keep the columns that a call returned, if its argument was the resident shard."""
        if parts and isinstance(parts[0], (NewShard, ResidentShardRef)):
            for label, column in named_columns(result):
                self._columns[f"{parts[0].number}/{label}"] = column.detach().cpu()

    def _select(self, part: ShardSelection) -> Batch:
        assert self._batch is not None
        new = arrays_to_columns(part.packed.arrays)
        token = {label: self._columns[name] for label, name in part.names.items() if label.startswith("token/")}
        sequence = {label: self._columns[name] for label, name in part.names.items() if label.startswith("sequence/")}
        rows = new.pop(ROW_LABEL)
        pictures = {name: column for name, column in self._batch.ragged.items() if name in PICTURE_COLUMNS}
        held = Batch(self._batch.tokens, self._batch.offsets, token, sequence, pictures).select(rows)
        found = batch_from_columns({"tokens": held.tokens, "offsets": held.offsets} | held.token | held.sequence | new)
        return replace(found, ragged=held.ragged, pictures=self._batch.pictures)


def named_columns(result: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and columns of a result that is one column or a dictionary of them."""
    if isinstance(result, Tensor):
        yield "", result
    elif isinstance(result, dict):
        yield from ((str(name), column) for name, column in result.items() if isinstance(column, Tensor))


# --- The driver's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResidentColumn:
    """A column of the whole batch of which the ranks have their shards."""

    label: str
    column: Tensor
    version: int
    """torch's counter of in-place changes. A column that was changed since is not what the ranks have."""

    @staticmethod
    def of(label: str, column: Tensor) -> ResidentColumn:
        return ResidentColumn(label, column, column._version)


class ResidentBatch:
    """The batch of which the ranks of a group have shards."""

    def __init__(self, batch: Batch, plan: ShardPlan, key: int) -> None:
        self.batch, self.plan, self.key = batch, plan, key
        self._calls = 0
        labelled = {f"token/{n}": c for n, c in batch.token.items()}
        labelled |= {f"sequence/{n}": c for n, c in batch.sequence.items()}
        self._held = {id(column): ResidentColumn.of(label, column) for label, column in labelled.items()}
        self._owner, self._row = _owner_and_row(plan)

    def first_message(self) -> ShardedBatch:
        """The shards for the first call with this batch: all columns, to be kept."""
        arrays, number = (
            with_original_index(batch_to_arrays(self.batch, self.batch.tokens.dtype), self.batch.num_sequences),
            self._next(),
        )
        return ShardedBatch(self.plan, [NewShard(self.key, number, part) for part in shards_of(arrays, self.plan)])

    def repeated_message(self) -> ShardedBatch:
        """The message for later calls with the same batch."""
        number = self._next()
        return ShardedBatch(self.plan, [ResidentShardRef(self.key, number)] * self.plan.num_parts)

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def note_result(self, sent: ShardedBatch, result: Any) -> None:
        """Note that the ranks have the columns that a call returned, if its argument was this batch."""
        part = sent.parts[0]
        if isinstance(part, (NewShard, ResidentShardRef)) and part.key == self.key:
            for label, column in named_columns(result):
                self._held[id(column)] = ResidentColumn.of(f"{part.number}/{label}", column)

    def selection_message(self, batch: Batch) -> ShardedBatch | None:
        """The message for a selection of this batch; None for any other batch, or if the ranks' work would be imbalanced."""
        found = self._trace(batch)
        if found is None:
            return None
        index, names = found
        plan = plan_from_owners(self._owner[index], self.plan.num_parts, batch.offsets.cpu().numpy())
        if _is_imbalanced(batch, plan):
            return None
        new = {
            f"{kind}/{name}": column
            for kind, columns in (("token", batch.token), ("sequence", batch.sequence))
            for name, column in columns.items()
            if f"{kind}/{name}" not in names
        }
        arrays = with_original_index(columns_to_arrays(new), batch.num_sequences) | {ROW_LABEL: self._row[index]}
        return ShardedBatch(plan, [ShardSelection(self.key, names, part) for part in shards_of(arrays, plan)])

    def _trace(self, batch: Batch) -> tuple[np.ndarray, dict[str, str]] | None:
        """The sequences of this batch that a selection has, and its columns that come from resident columns."""
        if batch.ragged.keys() - PICTURE_COLUMNS:  # images belong to the tokens, and the ranks have them with those
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
        """The ranks' label of a column of the whole batch; None if they do not have it."""
        held = self._held.get(id(column))
        if held is not None and held.column is column:
            return held.label if column._version == held.version else None
        if column.dtype == torch.bool:  # `loss_mask` starts as a copy of `action_mask`
            for held in self._held.values():
                same = held.column.dtype == torch.bool and held.column._version == held.version
                if same and torch.equal(held.column, column):
                    self._held[id(column)] = ResidentColumn.of(held.label, column)
                    return held.label
        return None


def _source_columns(
    columns: Mapping[str, Tensor], taken: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The source of each column of a selection that is still the selected one and was not changed."""
    # A view shares the counter of changes with its source.
    return {
        name: whole[name]
        for name, column in columns.items()
        if taken.get(name) is column and (column._version == 0 or column._base is not None)
    }


def _owner_and_row(plan: ShardPlan) -> tuple[np.ndarray, np.ndarray]:
    """[S] shard of every sequence, and its row there."""
    runs, ends = plan.sequence_ranges
    counts = np.diff(ends)
    owner, row = np.empty(ends[-1], dtype=np.int64), np.empty(ends[-1], dtype=np.int64)
    starts, stops = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    before = np.cumsum(stops - starts) - (stops - starts)
    order = np.repeat(starts - before, stops - starts) + np.arange(ends[-1])  # sequences in the order of the shards
    owner[order] = np.repeat(np.arange(plan.num_parts), counts)
    row[order] = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
    return owner, row


def _is_imbalanced(batch: Batch, plan: ShardPlan) -> bool:
    """Whether a rank has much more work than the mean, by more than the largest group: groups are never divided."""
    totals = np.diff(plan.token_ranges_in_order[1])
    mean, most = totals.mean(), totals.max()
    if most <= MAX_IMBALANCE * mean:
        return False
    lengths = np.diff(plan.offsets)
    groups = batch.sequence["group_ids"].cpu().numpy() if "group_ids" in batch.sequence else np.arange(len(lengths))
    sizes = np.bincount(np.unique(groups, return_inverse=True)[1], weights=lengths)
    return bool(most > mean + sizes.max())
