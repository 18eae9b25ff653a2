"""Batches and tensors as flat numpy arrays, for travel between processes.

An object store moves numpy arrays without looking into them, which is about ten times faster than tensors. `encode` finds
batches and tensors inside tuples, lists, dictionaries and dataclasses; `decode` is its inverse. Types that numpy does not have
travel as integers of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.core.batch import Batch, Ragged

Arrays = dict[str, np.ndarray]
DTYPES_WITHOUT_NUMPY = {torch.bfloat16: torch.int16}
"""Types that numpy does not have, and what they travel as."""
TOKEN_WIRE_DTYPE = torch.int32
"""What tokens travel as."""
LEAF_TYPES = frozenset({int, float, str, bool, type(None), bytes, torch.dtype})
"""What holds nothing: most of what is looked at is."""
DTYPE_SEPARATOR = "\0"
"""Between the name of such a column and its type: no name of a column has it."""
PACKED_BITS = "bits"
"""The type of a mask that travels as bits, before the number of its values."""


_fields_by_type: dict[type, tuple[str, ...]] = {}


@dataclass(frozen=True)
class PackedArrays:
    """A batch (by the names of its columns) or a tensor (under the empty name) on its way."""

    arrays: Arrays

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class ArrayMessage:
    """A message that is made of arrays and plain values: it travels as it is, and nobody need look into it."""

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if type(value) is np.ndarray)


def tensor_to_array(tensor: Tensor) -> np.ndarray:
    """A tensor's content where it is, or in host memory; its type must be one of numpy's, or travel as one."""
    tensor = tensor.detach().cpu()
    array: np.ndarray = tensor.view(DTYPES_WITHOUT_NUMPY.get(tensor.dtype, tensor.dtype)).numpy()
    return array


def array_to_tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    """The inverse. What lies in a store may not be written to, so it is copied."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if dtype is None or dtype == tensor.dtype else tensor.view(dtype)


def batch_to_arrays(batch: Batch, token_type: torch.dtype = TOKEN_WIRE_DTYPE) -> Arrays:
    """Every column under its kind and name, and its type where numpy does not have that; tokens in half of their size."""
    columns = {"tokens": batch.tokens.to(token_type), "offsets": batch.offsets}
    columns |= {f"token/{name}": column for name, column in batch.token.items()}
    columns |= {f"sequence/{name}": column for name, column in batch.sequence.items()}
    for name, ragged in batch.ragged.items():
        columns |= {f"values/{name}": ragged.values, f"bounds/{name}": ragged.offsets}
    return columns_to_arrays(columns)


def columns_to_arrays(columns: dict[str, Tensor]) -> Arrays:
    """Columns by kind and name as arrays, under their types where numpy does not have those."""
    return {_label(name, column): tensor_to_array(column) for name, column in columns.items()}


def batch_from_arrays(arrays: Arrays) -> Batch:
    """The inverse of `to_arrays`."""
    return batch_from_columns(arrays_to_columns(arrays))


def arrays_to_columns(arrays: Arrays) -> dict[str, Tensor]:
    """Arrays as the columns they were, by kind and name."""
    return dict(_parse_label(label, array) for label, array in arrays.items())


def batch_from_columns(columns: dict[str, Tensor]) -> Batch:
    """The batch of columns under their kinds and names."""

    def kind(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): column for name, column in columns.items() if name.startswith(prefix)}

    bounds = kind("bounds/")
    return Batch(
        tokens=columns["tokens"].to(torch.int64),
        offsets=columns["offsets"],
        token=kind("token/"),
        sequence=kind("sequence/"),
        ragged={name: Ragged(values, bounds[name]) for name, values in kind("values/").items()},
    )


def encode(value: Any) -> Any:
    """The value with every batch and tensor in it packed."""
    if type(value) in LEAF_TYPES:
        return value
    if isinstance(value, (PackedArrays, ArrayMessage)):
        return value
    if isinstance(value, Batch):
        return PackedArrays(batch_to_arrays(value))
    if isinstance(value, Tensor):
        return PackedArrays({_label("", value): tensor_to_array(value)})
    return _map_members(value, encode)


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if type(value) in LEAF_TYPES:
        return value
    if isinstance(value, ArrayMessage):
        return value
    if not isinstance(value, PackedArrays):
        return _map_members(value, decode)
    if "tokens" in value.arrays:
        return batch_from_arrays(value.arrays)
    [(label, array)] = value.arrays.items()
    return _parse_label(label, array)[1]


def num_array_bytes(value: Any) -> int:
    """Of the arrays in an encoded value; what else it holds is small."""
    if type(value) in LEAF_TYPES:
        return 0
    if isinstance(value, (PackedArrays, ArrayMessage)):
        return value.num_bytes
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (tuple, list)):
        return 0 if _are_leaves(value) else sum(num_array_bytes(item) for item in value)
    if isinstance(value, dict):
        return 0 if _are_leaves(value.values()) else sum(num_array_bytes(item) for item in value.values())
    return sum(num_array_bytes(getattr(value, name)) for name in _init_fields(type(value)))


def _map_members(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` done to what it is made of; the same object where that changes nothing."""
    if type(value) is dict:
        if _are_leaves(value.values()):
            return value
        items = {key: change(item) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in value) else value
    if type(value) in (tuple, list):
        if _are_leaves(value):
            return value
        members = [change(item) for item in value]
        return type(value)(members) if any(a is not b for a, b in zip(members, value, strict=True)) else value
    names = _init_fields(type(value))
    changed = {name: new for name in names if (new := change(old := getattr(value, name))) is not old}
    return replace(value, **changed) if changed else value


def _are_leaves(members: Iterable[Any]) -> bool:
    """Whether nothing in a collection can hold a tensor: a step has lists of tens of thousands of names."""
    return LEAF_TYPES.issuperset(map(type, members))


def _init_fields(kind: type) -> tuple[str, ...]:
    """The names that make an object of a dataclass; none of any other class."""
    if kind not in _fields_by_type:
        _fields_by_type[kind] = tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else ()
    return _fields_by_type[kind]


def pack_mask(label: str, mask: np.ndarray) -> tuple[str, np.ndarray]:
    """A mask in an eighth of its bytes, and the label that says so."""
    return f"{label}{DTYPE_SEPARATOR}{PACKED_BITS}{mask.size}", np.packbits(mask)


def array_and_dtype(packed: PackedArrays) -> tuple[np.ndarray, torch.dtype | None]:
    """The array of a tensor where it lies, and what it is to be read as; None: as what it is."""
    [(label, array)] = packed.arrays.items()
    _, _, dtype = label.partition(DTYPE_SEPARATOR)
    return array, getattr(torch, dtype) if dtype else None


def _label(name: str, tensor: Tensor) -> str:
    return (
        f"{name}{DTYPE_SEPARATOR}{str(tensor.dtype).removeprefix('torch.')}"
        if tensor.dtype in DTYPES_WITHOUT_NUMPY
        else name
    )


def _parse_label(label: str, array: np.ndarray) -> tuple[str, Tensor]:
    name, _, dtype = label.partition(DTYPE_SEPARATOR)
    if dtype.startswith(PACKED_BITS):
        count = int(dtype.removeprefix(PACKED_BITS))
        return name, torch.from_numpy(np.unpackbits(array, count=count).view(bool))
    return name, array_to_tensor(array, getattr(torch, dtype) if dtype else None)
