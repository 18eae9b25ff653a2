"""Parameter groups: what they match, that they change nothing else, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.model import Optimizer as Config
from burnish.models.decoder import Decoder
from burnish.training.optimizers.update_rules import make_optimizer

MakeModel = Callable[..., Decoder]


def after(make_model: MakeModel, groups: list[dict[str, Any]], name: str = "adamw") -> dict[str, Tensor]:
    """The weights after two updates."""
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(model, parameters, Config(name=name, lr=0.01, weight_decay=0.1, groups=groups))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step(0.01, 0)
    return {key: parameter.detach() for key, parameter in parameters.items()}


def changed(make_model: MakeModel, *groups: dict[str, Any], name: str = "adamw") -> set[str]:
    plain, grouped = after(make_model, [], name), after(make_model, list(groups), name)
    return {key for key in plain if not torch.equal(plain[key], grouped[key])}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("match", "names"),
    [
        ("embed", {"embedding.weight"}),
        ("lm_head", {"head.weight"}),
        ("self_attn.*weight", {f"layers.0.{n}.weight" for n in ("qkv", "out", "q_norm", "k_norm")}),
        (r"mlp\.", {"layers.0.gate_up.weight", "layers.0.down.weight"}),
        ("bias$", {"layers.0.qkv.bias"}),
        (r"model\.layers\.0\.mlp\.(gate|up)", {"layers.0.gate_up.weight"}),
    ],
)
def test_a_group_changes_what_it_matches_by_either_name_and_nothing_else(
    make_model: MakeModel, name: str, match: str, names: set[str]
) -> None:
    assert changed(make_model, {"match": match, "lr_scale": 0.5}, name=name) == names


def test_a_learning_rate_of_zero_freezes(make_model: MakeModel) -> None:
    start = dict(make_model().named_parameters())
    found = after(make_model, [{"match": "embedding", "lr_scale": 0}])
    assert torch.equal(found["embedding.weight"], start["embedding.weight"])
    assert not torch.equal(found["head.weight"], start["head.weight"])


def test_rates_are_factors_and_decays_are_values(make_model: MakeModel) -> None:
    model = make_model()
    parameters = dict(model.named_parameters())
    groups = [{"match": "^norm", "weight_decay": 0.5}, {"match": "head", "lr_scale": 3, "weight_decay": 0.2}]
    optimizer = make_optimizer(model, parameters, Config(lr=0.01, weight_decay=0.1, groups=groups))
    start = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.01, 0)
    shrunk = {"norm.weight": 0.01 * 0.5, "head.weight": 0.03 * 0.2}
    for key, parameter in parameters.items():
        factor = 1 - shrunk.get(key, 0.01 * 0.1 if parameter.dim() == 2 else 0)
        torch.testing.assert_close(parameter.detach(), start[key] * factor, atol=1e-14, rtol=0)


def test_the_first_group_that_matches_counts(make_model: MakeModel) -> None:
    narrow, wide = {"match": "head", "lr_scale": 2}, {"match": "weight", "lr_scale": 0.5}
    both = after(make_model, [narrow, wide])
    assert torch.equal(both["head.weight"], after(make_model, [narrow])["head.weight"])
    assert torch.equal(both["embedding.weight"], after(make_model, [wide])["embedding.weight"])


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"match": "embeding", "lr_scale": 2}], "'embeding' matches no parameter; the nearest are embedding.weight"),
        ([{"match": "layers.1", "lr_scale": 2}], "the nearest are"),
        ([{"match": "qproj", "lr_scale": 2}], "model.layers.<i>.self_attn.q_proj.weight"),
        ([{"match": "weight", "lr_scale": 2}, {"match": "head", "lr_scale": 3}], "is in an earlier group, head.weight"),
        (
            [{"match": "q_proj", "lr_scale": 2}],
            "q_proj.weight, which is one parameter, layers.0.qkv.weight, with model.layers.0.self_attn.k_proj.weight",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused_with_the_reason(
    make_model: MakeModel, groups: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(UserError) as error:
        after(make_model, groups)
    assert words in str(error.value)
