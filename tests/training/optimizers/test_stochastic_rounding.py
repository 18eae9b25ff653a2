"""Stochastic rounding goes to a neighbour, is unbiased and reproducible, and keeps small updates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.model import Optimizer as Config
from burnish.training.optimizers.stochastic_rounding import generator_for, to_bfloat16
from burnish.training.optimizers.update_rules import AdamW

CPU = torch.device("cpu")
NUMBERS = torch.tensor([1.001, -1.001, 3.14159, -0.3, 1e-3, -7e10, 2.0**-126 * 1.003, 0.0])


def drawn(numbers: Tensor, count: int) -> Tensor:
    return to_bfloat16(numbers.repeat(count, 1), generator_for(CPU, "test"))


def test_a_number_becomes_one_of_its_two_neighbours() -> None:
    found = drawn(NUMBERS, 200).double()
    nearest = NUMBERS.bfloat16().double()
    step = nearest.abs() * 2**-7
    for column, number in enumerate(NUMBERS.double()):
        values = found[:, column].unique()
        assert len(values) == (1 if number == 0 else 2)
        assert float((values - number).abs().max()) <= float(step[column])
        assert values.min() <= number <= values.max()


def test_the_mean_of_many_draws_is_the_number() -> None:
    count = 20_000
    found = drawn(NUMBERS, count).double()
    gap = found.amax(0) - found.amin(0)
    error = (found.mean(0) - NUMBERS.double()).abs()
    assert bool((error <= 5 * 0.5 * gap / count**0.5).all())


def test_what_bfloat16_can_hold_is_left_alone() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.0, 2.0**-130])
    for exact in (numbers, special):
        assert torch.equal(to_bfloat16(exact, generator_for(CPU, 1)).float(), exact)
    assert bool(to_bfloat16(torch.tensor([torch.nan]), generator_for(CPU, 1)).isnan().all())


def test_draws_depend_on_what_they_are_for_and_on_nothing_else() -> None:
    numbers = torch.full((1000,), 1.001)
    first = to_bfloat16(numbers, generator_for(CPU, "w", 1, 0))
    torch.manual_seed(7)
    torch.rand(3)
    assert torch.equal(to_bfloat16(numbers, generator_for(CPU, "w", 1, 0)), first)
    for other in (("v", 1, 0), ("w", 2, 0), ("w", 1, 8)):
        assert not torch.equal(to_bfloat16(numbers, generator_for(CPU, *other)), first)


def test_it_learns_where_plain_bfloat16_stands_still() -> None:
    """Under a constant gradient every update of AdamW is lr: 200 of 1e-4 take 0.02 off a weight of 1."""
    plain = torch.ones(64, 64, dtype=torch.bfloat16)
    for _ in range(200):
        plain = (plain.float() - 1e-4).bfloat16()
    assert torch.equal(plain, torch.ones_like(plain))
    parameter = torch.ones(64, 64, dtype=torch.bfloat16)
    optimizer = AdamW({"w": parameter}, Config(lr=1e-4, precision="stochastic"))
    for update in range(200):
        parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step(1e-4, update)
    assert float(parameter.float().mean()) == pytest.approx(0.98, abs=6e-4)
    assert "master/w" not in optimizer.tensors()


def test_moments_that_begin_anew_meet_new_randomness() -> None:
    """A weight that met the same threshold at every update would never move, or always: on average over weights, but not over time."""
    parameter = torch.ones(64, 64, dtype=torch.bfloat16)
    optimizer = AdamW({"w": parameter}, Config(lr=1e-5, precision="stochastic"))
    for update in range(400):
        parameter.grad = torch.full_like(parameter, -0.5)
        optimizer.step(1e-5, update)
        optimizer.reset()
    assert float(parameter.float().mean()) == pytest.approx(1.004, abs=3e-4)
    assert 0.3 < float((parameter > 1).float().mean()) < 0.5  # 1 - exp(-400 * 1e-5 / 2^-7) = 0.4


def test_it_has_no_effect_on_a_wide_model_and_says_so() -> None:
    with pytest.raises(UserError, match="no parameter is bfloat16"):
        AdamW({"w": torch.zeros(2, 2)}, Config(precision="stochastic"))


def test_wide_parameters_of_a_half_model_are_their_own_masters() -> None:
    """The scalar head of a critic on a bfloat16 backbone."""
    parameters = {"w": torch.ones(4, 4, dtype=torch.bfloat16), "head": torch.ones(1, 4)}
    optimizer = AdamW(parameters, Config(precision="stochastic"))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-4, 0)
    torch.testing.assert_close(parameters["head"], torch.full((1, 4), 1 - 1e-4))
