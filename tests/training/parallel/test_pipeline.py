"""Stages and their schedule. That a pipeline computes what one process does is tested in `test_several_ranks.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.training.parallel.pipeline import OneForwardOneBackward, StageLayers, layer_ranges


def test_layers_are_divided_evenly_and_the_last_stage_has_no_more_than_others() -> None:
    assert layer_ranges(8, 2) == [range(4), range(4, 8)]
    assert layer_ranges(61, 4) == [range(16), range(16, 31), range(31, 46), range(46, 61)]
    with pytest.raises(UserError, match=r"parallel\.pipeline=3 needs as many layers, and the model has 2"):
        layer_ranges(2, 3)


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
