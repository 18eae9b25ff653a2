"""How experts are laid out over ranks, and divisions that are refused. That they train alike is tested in `test_several_ranks.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from burnish.config.errors import UserError
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.model_families import FAMILIES
from burnish.models.weight_layout import expert_row_order
from burnish.training.parallel.expert_parallel import apply_expert_parallel


def model(shape: ExpertShape | None) -> Decoder:
    fields = FAMILIES["qwen3_moe"].fixed
    return Decoder(Architecture("qwen3_moe", 11, 16, 1, 4, 2, 4, 24, 32, **fields, experts=shape))


def mesh(**sizes: int) -> Any:
    return cast(Any, SimpleNamespace(mesh_dim_names=tuple(sizes), shape=tuple(sizes.values())))


@pytest.mark.parametrize(
    ("sizes", "shape", "reason"),
    [
        ({"expert": 4}, ExpertShape(6, 2, 12), "parallel.expert=4 does not divide the model's 6 experts"),
        ({"expert": 2, "tensor": 8}, ExpertShape(6, 2, 12), "parallel.tensor=8 does not divide the model's 12 columns"),
        ({"expert": 2}, None, "parallel.expert=2 has no effect: the model has no experts"),
    ],
)
def test_what_cannot_be_divided_is_refused(sizes: dict[str, int], shape: ExpertShape | None, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        apply_expert_parallel(model(shape), mesh(**sizes))


def test_a_model_without_experts_is_not_changed_by_tensor_parallelism_of_experts() -> None:
    dense = model(None)
    before = dense.state_dict()
    apply_expert_parallel(dense, mesh(tensor=2))
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


def test_the_rows_of_a_rank_are_its_columns_of_its_experts() -> None:
    shape = ExpertShape(num_experts=4, experts_per_token=2, expert_size=2)
    rows = [(expert, kind, column) for expert in range(4) for kind in ("gate", "up") for column in range(2)]
    order = expert_row_order(shape, 2, 2).view(2, 2, -1)  # [expert ranks, tensor ranks, rows]
    for expert_rank in range(2):
        for tensor_rank in range(2):
            found = [rows[row] for row in order[expert_rank, tensor_rank].tolist()]
            own = (2 * expert_rank, 2 * expert_rank + 1)
            assert found == [(expert, kind, tensor_rank) for expert in own for kind in ("gate", "up")]
