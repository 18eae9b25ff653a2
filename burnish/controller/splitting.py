"""A batch in the parts that its division (`division.py`) says, the rest of a call's arguments, and results put together: the
arithmetic behind the marks of `core/spread.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.controller.division import Division, Runs
from burnish.core.batch import Batch
from burnish.core.wire import MARK, Arrays, Packed, as_bits, decode, one_array, to_array, to_arrays, to_tensor
from burnish.training.parallel.ranks import PLACE

# --- apart ---------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Divided:
    """A batch in parts that can be sent: made once, however many calls are given it."""

    division: Division
    parts: list[Any]
    stored: dict[Any, Any] = field(default_factory=dict)
    """What stands for parts in a store; of whoever put them there."""


def divided(batch: Batch, division: Division) -> Divided:
    """A batch in parts that hold all of it."""
    arrays = numbered(to_arrays(batch, batch.tokens.dtype), batch.num_sequences)
    return Divided(division, list(parts_of(arrays, division)))


def numbered(arrays: Arrays, num_sequences: int) -> Arrays:
    """The arrays with the number of every sequence, by which order can be restored."""
    return arrays | {f"sequence/{PLACE}": np.arange(num_sequences)}


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


def parts_of(arrays: Arrays, division: Division) -> list[Packed]:
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
            pieces = _cut(array, stretches, token_ends, narrow)
        elif kind == "sequence":
            pieces = _cut(array, runs, ends, array.dtype)
        elif kind in ("offsets", "bounds"):
            lengths = _cut(np.diff(array), runs, ends, array.dtype)
            pieces = [np.concatenate([array[:1] * 0, np.cumsum(own)]) for own in lengths]
        else:  # the values between bounds
            of = arrays[f"bounds/{name.partition(MARK)[0]}"]
            inner = [(int(of[a]), int(of[b])) for a, b in runs]
            sizes = np.cumsum([0, *(b - a for a, b in inner)])
            pieces = _cut(array, inner, sizes[division.run_ends].tolist(), array.dtype)
        is_mask = kind == "token" and array.dtype == bool and array.ndim == 1
        for part, piece in zip(found, pieces, strict=True):
            name, content = as_bits(label, piece) if is_mask else (label, piece)
            part[name] = content
    return [Packed(part) for part in found]


def _cut(array: np.ndarray, stretches: Runs, ends: Sequence[int], dtype: Any) -> list[np.ndarray]:
    """Stretches of an array, one after the other, as another type, in pieces that end at `ends` (the first of which is 0)."""
    parts = [array[a:b] for a, b in stretches] or [array[:0]]
    whole = np.concatenate(parts, dtype=dtype, casting="same_kind")
    return [whole[a:b] for a, b in zip(ends, ends[1:], strict=False)]


# --- together ------------------------------------------------------------------------------------------------------------


def join_parts(results: Sequence[Any], division: Division) -> Any:
    """Columns in the order of the whole batch; of anything else that of the first part.

    Results may be as they travelled: then columns are copied once, from where they lie to their places.
    """
    first = results[0]
    if isinstance(first, (Tensor, Packed)):
        return _joined(results, division)
    if type(first) is dict:
        return {key: join_parts([result[key] for result in results], division) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(join_parts(items, division) for items in zip(*results, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first)]
        return replace(first, **{n: join_parts([getattr(r, n) for r in results], division) for n in names})
    return first


def _joined(columns: Sequence[Tensor | Packed], division: Division) -> Tensor:
    if division.num_parts == 1:
        whole: Tensor = decode(columns[0])
        return whole
    arrays, kinds = zip(*(_array(column) for column in columns), strict=True)
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
    return to_tensor(target, kinds[like])


def _array(column: Tensor | Packed) -> tuple[np.ndarray, torch.dtype | None]:
    """A column where it is, and its type."""
    return (to_array(column), column.dtype) if isinstance(column, Tensor) else one_array(column)
