"""Stages and their schedule. That a pipeline computes what one process does is tested in `test_several_ranks.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.models.architecture import Architecture
from burnish.models.tensor_shards import layer_ranges
from burnish.training.parallel.pipeline import OneForwardOneBackward, StageLayers, head_layers


def test_layers_are_divided_evenly_and_the_last_stage_has_fewer_if_the_head_makes_it_the_slowest() -> None:
    assert layer_ranges(8, 1) == [range(8)]
    assert layer_ranges(8, 2) == [range(4), range(4, 8)]
    assert layer_ranges(61, 4) == [range(16), range(16, 31), range(31, 46), range(46, 61)]
    assert [len(part) for part in layer_ranges(61, 16)] == [4] * 13 + [3] * 3
    assert [len(part) for part in layer_ranges(61, 16, head_layers=1.5)] == [4] * 14 + [3, 2]
    assert [len(part) for part in layer_ranges(28, 2, head_layers=5.0)] == [
        14,
        14,
    ]  # more layers would need more memory
    with pytest.raises(UserError, match=r"parallel\.pipeline=3 needs as many layers, and the model has 2"):
        layer_ranges(2, 3)


@given(num_layers=st.integers(1, 100), num_stages=st.integers(1, 20), head=st.floats(0, 20))
def test_every_layer_is_in_one_stage_and_no_stage_is_empty_or_larger_than_in_an_even_division(
    num_layers: int, num_stages: int, head: float
) -> None:
    if num_layers >= num_stages:
        found = layer_ranges(num_layers, num_stages, head)
        assert [index for part in found for index in part] == list(range(num_layers))
        assert len(found) == num_stages
        assert all(1 <= len(part) <= -(-num_layers // num_stages) for part in found)


def test_the_work_of_the_head_is_counted_in_layers() -> None:
    arch = Architecture("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 64)
    assert head_layers(arch) == pytest.approx(151936 * 1536 / (1536 * (2048 + 1536 + 3 * 8960)))


def test_layers_of_a_stage_keep_their_numbers() -> None:
    layers = StageLayers({index: nn.Linear(1, 1) for index in (4, 5)})
    assert [name for name, _ in layers.named_parameters()] == ["4.weight", "4.bias", "5.weight", "5.bias"]
    assert layers[0] is layers.get_submodule("4")
    assert (len(layers), list(layers)) == (2, [layers[0], layers[1]])


@pytest.mark.parametrize(
    ("stage", "order"),
    [(0, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"), (1, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"), (2, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4")],
)
def test_a_stage_goes_forward_once_for_each_later_stage_before_it_goes_backward(stage: int, order: str) -> None:
    model = cast(Any, SimpleNamespace(pipeline_stage=SimpleNamespace(index=stage, count=3)))
    said: list[str] = []

    def backward(result: Tensor) -> None:
        said.append(f"B{int(result)}")

    schedule = OneForwardOneBackward(model, backward)
    for number in range(5):
        said.append(f"F{number}")
        schedule.add(torch.tensor(number))
    schedule.finish()
    assert " ".join(said) == order
