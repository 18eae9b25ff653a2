"""`encode` and `decode` turn batches and tensors into flat numpy arrays and back, to send them between processes.

An object store moves a numpy array as one buffer, about ten times faster than a tensor. `encode` replaces every batch and
tensor inside tuples, lists, dictionaries and dataclasses by `PackedArrays`; `decode` is its inverse. Two things are made
smaller on the way: token ids are sent as int32, and masks that are split over ranks are sent as bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.core.batch import Batch, Ragged
from burnish.core.pictures import PICTURE_LABEL, Picture, pictures_from_arrays, pictures_to_arrays

Arrays = dict[str, np.ndarray]
"""Arrays by label: the kind and name of a column, such as `token/logp`, and its dtype if numpy does not have that dtype. Pixels of
images are arrays too (`pictures_to_arrays`)."""
DTYPES_WITHOUT_NUMPY = {torch.bfloat16: torch.int16}
"""Dtypes that numpy does not have, and the integer dtype of the same size that carries their bits."""
TOKEN_WIRE_DTYPE = torch.int32
"""Dtype in which token ids are sent."""
LEAF_TYPES = frozenset({int, float, str, bool, type(None), bytes, torch.dtype})
"""Types that cannot contain a tensor. Most values in a message have one of these."""
DTYPE_SEPARATOR = "\0"
"""Separates the name from the dtype in a label. No column name contains it."""
PACKED_BITS = "bits"
"""In the label of a mask that is sent as bits, this word and the number of values replace the dtype."""
_fields_by_type: dict[type, tuple[str, ...]] = {}


@dataclass(frozen=True)
class PackedArrays:
    """An encoded batch (one array per column), or an encoded tensor (one array with an empty name)."""

    arrays: Arrays

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def encode(value: Any) -> Any:
    """Return the value with every batch and tensor in it replaced by `PackedArrays`."""
    if type(value) in LEAF_TYPES or isinstance(value, PackedArrays):
        return value
    if isinstance(value, Batch):
        return PackedArrays(batch_to_arrays(value))
    if isinstance(value, Tensor):
        return PackedArrays(columns_to_arrays({"": value}))
    return _map_members(value, encode)


def decode(value: Any) -> Any:
    """Inverse of `encode`."""
    if type(value) in LEAF_TYPES:
        return value
    if not isinstance(value, PackedArrays):
        return _map_members(value, decode)
    if "tokens" in value.arrays:
        return batch_from_arrays(value.arrays)
    [column] = arrays_to_columns(value.arrays).values()
    return column


def num_array_bytes(value: Any) -> int:
    """Return the bytes of all arrays in an encoded value. Everything else in it is small."""
    if type(value) in LEAF_TYPES:
        return 0
    if isinstance(value, PackedArrays):
        return value.num_bytes
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (tuple, list)):
        return 0 if _are_leaves(value) else sum(num_array_bytes(item) for item in value)
    if isinstance(value, dict):
        return 0 if _are_leaves(value.values()) else sum(num_array_bytes(item) for item in value.values())
    return sum(num_array_bytes(getattr(value, name)) for name in _init_fields(type(value)))


def batch_to_arrays(batch: Batch, token_dtype: torch.dtype = TOKEN_WIRE_DTYPE) -> Arrays:
    """Return every column of a batch as an array, labelled with its kind and name, and the images that it reads."""
    columns = {"tokens": batch.tokens.to(token_dtype), "offsets": batch.offsets}
    columns |= {f"token/{name}": column for name, column in batch.token.items()}
    columns |= {f"sequence/{name}": column for name, column in batch.sequence.items()}
    for name, ragged in batch.ragged.items():
        columns |= {f"values/{name}": ragged.values, f"bounds/{name}": ragged.offsets}
    return columns_to_arrays(columns) | pictures_to_arrays(batch.needed_pictures.values())


def batch_from_arrays(arrays: Arrays) -> Batch:
    """Inverse of `batch_to_arrays`."""
    return batch_from_columns(arrays_to_columns(arrays), pictures_from_arrays(arrays))


def batch_from_columns(columns: dict[str, Tensor], pictures: Mapping[int, Picture] | None = None) -> Batch:
    """Build a batch from tensors labelled with their kind and name."""

    def of_kind(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): column for name, column in columns.items() if name.startswith(prefix)}

    bounds = of_kind("bounds/")
    return Batch(
        tokens=columns["tokens"].to(torch.int64),
        offsets=columns["offsets"],
        token=of_kind("token/"),
        sequence=of_kind("sequence/"),
        ragged={name: Ragged(values, bounds[name]) for name, values in of_kind("values/").items()},
        pictures=pictures or {},
    )


def columns_to_arrays(columns: dict[str, Tensor]) -> Arrays:
    """Convert named tensors to arrays. If numpy lacks a column's dtype, the label includes the dtype."""
    return {_label(name, column): tensor_to_array(column) for name, column in columns.items()}


def arrays_to_columns(arrays: Arrays) -> dict[str, Tensor]:
    """Inverse of `columns_to_arrays`; also unpacks masks that were sent as bits. Pixels are left out."""
    columns = {}
    for label, array in arrays.items():
        if label.startswith(PICTURE_LABEL):
            continue
        name, _, dtype = label.partition(DTYPE_SEPARATOR)
        if dtype.startswith(PACKED_BITS):
            count = int(dtype.removeprefix(PACKED_BITS))
            columns[name] = torch.from_numpy(np.unpackbits(array, count=count).view(bool))
        else:
            columns[name] = array_to_tensor(array, getattr(torch, dtype) if dtype else None)
    return columns


def tensor_to_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values in host memory, without a copy if they are there. bfloat16 becomes int16 with the same bits."""
    tensor = tensor.detach().cpu()
    array: np.ndarray = tensor.view(DTYPES_WITHOUT_NUMPY.get(tensor.dtype, tensor.dtype)).numpy()
    return array


def array_to_tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    """Inverse of `tensor_to_array`. A read-only array, as an object store returns it, is copied."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if dtype is None or dtype == tensor.dtype else tensor.view(dtype)


def array_and_dtype(packed: PackedArrays) -> tuple[np.ndarray, torch.dtype | None]:
    """Return the array of an encoded tensor without a copy, and the dtype to view it as (None: its own)."""
    [(label, array)] = packed.arrays.items()
    _, _, dtype = label.partition(DTYPE_SEPARATOR)
    return array, getattr(torch, dtype) if dtype else None


def pack_mask(label: str, mask: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the label that marks a mask as packed, and the mask as bits (an eighth of its bytes)."""
    return f"{label}{DTYPE_SEPARATOR}{PACKED_BITS}{mask.size}", np.packbits(mask)


def _label(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in DTYPES_WITHOUT_NUMPY:
        return name
    return f"{name}{DTYPE_SEPARATOR}{str(tensor.dtype).removeprefix('torch.')}"


def _map_members(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the members of a container or dataclass. Returns the same object if no member changed."""
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
    """Whether no member can contain a tensor. This is fast: a step has lists of tens of thousands of strings."""
    return LEAF_TYPES.issuperset(map(type, members))


def _init_fields(value_type: type) -> tuple[str, ...]:
    """Return the names of a dataclass's init fields; none for any other class."""
    if value_type not in _fields_by_type:
        _fields_by_type[value_type] = (
            tuple(field.name for field in fields(value_type) if field.init) if is_dataclass(value_type) else ()
        )
    return _fields_by_type[value_type]
