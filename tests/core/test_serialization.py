"""What travels arrives: batches and tensors as numpy arrays and back, bit for bit."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from burnish.core.serialization import (
    PackedArrays,
    array_to_tensor,
    batch_from_arrays,
    batch_to_arrays,
    decode,
    encode,
    num_array_bytes,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def batch_of(lengths: list[int]) -> Batch:
    n, s = sum(lengths), len(lengths)
    kinds = {f"{dtype}": (torch.randn(n) * 9).to(dtype) for dtype in DTYPES}
    return Batch(
        torch.arange(n),
        offsets_from_lengths(torch.tensor(lengths, dtype=torch.long)),
        kinds | {"wide": torch.randn(n, 3)},
        {"reward": torch.randn(s), "part/x.py:f": torch.randn(s).bfloat16()},
        {"images": Ragged(torch.randn(2 * s, 4), torch.arange(s + 1) * 2)},
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()


@given(st.lists(st.integers(1, 6), max_size=6))
def test_a_batch_comes_back_as_it_was(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    found = batch_from_arrays(pickle.loads(pickle.dumps(batch_to_arrays(batch))))
    assert same(found.tokens, batch.tokens)
    assert same(found.offsets, batch.offsets)
    assert list(found.token) == list(batch.token)
    assert all(same(found.token[name], column) for name, column in batch.token.items())
    assert all(same(found.sequence[name], column) for name, column in batch.sequence.items())
    assert same(found.ragged["images"].values, batch.ragged["images"].values)
    assert same(found.ragged["images"].offsets, batch.ragged["images"].offsets)


@dataclass(frozen=True)
class Record:
    name: str
    column: torch.Tensor
    inner: Any = None


def test_tensors_and_batches_are_found_wherever_they_stand() -> None:
    batch, column = batch_of([2, 3]), torch.randn(4).bfloat16()
    value = {"a": [1, (column, "x")], "b": Record("r", column, {"deep": batch}), "c": None}
    packed = encode(value)
    assert isinstance(packed["a"][1][0], PackedArrays)
    assert isinstance(packed["b"].inner["deep"], PackedArrays)
    found = decode(pickle.loads(pickle.dumps(packed)))
    assert found["a"][0] == 1
    assert same(found["a"][1][0], column)
    assert same(found["b"].column, column)
    assert same(found["b"].inner["deep"].token["wide"], batch.token["wide"])
    assert (found["b"].name, found["c"]) == ("r", None)


def test_what_holds_no_tensor_is_the_same_object() -> None:
    value = {"a": [1, 2], "b": Record("r", None)}  # type: ignore[arg-type]
    assert encode(value) is value
    assert decode(value) is value


def test_bytes_are_those_of_the_arrays() -> None:
    batch = Batch(torch.zeros(10, dtype=torch.long), torch.tensor([0, 10]), {"x": torch.zeros(10).bfloat16()})
    assert num_array_bytes(encode((batch, {"more": torch.zeros(3)}, 5))) == 40 + 16 + 20 + 12
    assert num_array_bytes([np.zeros(4, dtype=np.int16), "text"]) == 8


def test_what_may_not_be_written_to_is_copied() -> None:
    array = np.arange(3)
    assert array_to_tensor(array).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    tensor = array_to_tensor(array)
    tensor += 1
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_tensor_of_any_type(dtype: torch.dtype) -> None:
    tensor = (torch.randn(2, 3) * 9).to(dtype)
    assert same(decode(encode(tensor)), tensor)
