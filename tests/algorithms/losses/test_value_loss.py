"""The critic's loss and explained variance against the worked numbers, and where the clip takes the gradient away."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.losses.model_losses import ValueLoss, explained_variance, value_loss
from burnish.core.batch import Batch

NEW, OLD, RETURNS = [0.9, 0.3, 1.2, 1.6], [0.5, 0.6, 0.4, 0.8], [1.0, 1.0, 1.2, 1.0]
NAN = math.nan


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(loss: ValueLoss, values: list[float] = NEW) -> tuple[float, dict[str, float], Tensor]:
    """On two sequences of two written tokens each, behind prompts and with an observation in between."""
    mask = torch.tensor([False, True, False, True, False, True, True])
    place = torch.full((7,), NAN, dtype=torch.float64)
    batch = Batch(torch.zeros(7, dtype=torch.int64), torch.tensor([0, 4, 7]), {"loss_mask": mask, "action_mask": mask})
    for name, rows in {"values": OLD, "returns": RETURNS, "weight": [0.25] * 4}.items():
        batch = batch.with_token(**{name: place.masked_scatter(mask, column(rows))})
    value = column(values).requires_grad_()
    total, sums = loss(loss_view(batch, value=value))
    total.backward()
    assert value.grad is not None
    return float(total.detach()), {name: float(s) / 4 for name, s in sums.items()}, value.grad


def test_the_clipped_loss_is_the_worked_number() -> None:
    total, metrics, _ = run(ValueLoss())
    assert total == pytest.approx(0.11875, abs=1e-6)
    assert metrics == pytest.approx({"vf_clipfrac": 0.25, "value_mean": 1.0}, abs=1e-6)


def test_without_a_clip_it_is_half_the_mean_squared_error() -> None:
    total, metrics, gradient = run(ValueLoss(clip=None))
    assert total == pytest.approx(0.1075, abs=1e-6)
    assert metrics == pytest.approx({"vf_clipfrac": 0.0, "value_mean": 1.0}, abs=1e-6)
    torch.testing.assert_close(gradient, (column(NEW) - column(RETURNS)) / 4)


def test_a_value_outside_the_range_and_not_getting_worse_has_no_gradient() -> None:
    # Token 3 (1.2, old 0.4) is at its return, but its clipped self 0.9 is not: that is the larger error, and it is flat.
    # Token 4 (1.6, old 0.8) is clipped to 1.3, nearer to its return than it is itself: its own error counts.
    gradient = run(ValueLoss())[2]
    torch.testing.assert_close(gradient, column([-0.1, -0.7, 0.0, 0.6]) / 4)


@pytest.mark.parametrize("edge", [0.0, 1.0])
def test_at_the_edge_of_the_range_both_errors_are_one_and_nothing_counts_as_clipped(edge: float) -> None:
    old, returns = column([0.5]), column([0.4])
    loss, outside = value_loss(column([edge]), returns, old, 0.5)
    assert loss.item() == pytest.approx(0.5 * (edge - 0.4) ** 2)
    assert not outside.any()


def test_the_record_says_what_it_needs_and_travels() -> None:
    loss = ValueLoss(clip=0.2)
    assert (loss.needs, loss.scope) == (frozenset({"value"}), "token")
    assert pickle.loads(pickle.dumps(loss)) == loss


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=8), st.floats(0.01, 2))
def test_the_clip_never_lowers_the_loss(rows: list[tuple[float, float, float]], clip: float) -> None:
    value, returns, old = (column(list(c)) for c in zip(*rows, strict=True))
    clipped, outside = value_loss(value, returns, old, clip)
    plain, _ = value_loss(value, returns, old, None)
    assert (clipped >= plain).all()
    assert torch.equal(outside, clipped > plain)


def test_explained_variance_is_the_worked_number_whatever_stands_outside_the_mask() -> None:
    returns, values = column([1, 0, NAN, 1, 0.5]), column([0.8, 0.2, NAN, 0.9, 0.1])
    mask = torch.tensor([True, True, False, True, True])
    assert explained_variance(returns, values, mask) == pytest.approx(0.727273, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 0.0, 1.0], 1.0), ([0.3, 0.3, 0.3], 0.0), ([3.0, 2.0, 3.0], 1.0), ([0.0, 1.0, 0.0], -3.0)],
    ids=["perfect", "constant", "off by a constant", "reversed"],
)
def test_explained_variance_of_critics_one_knows(values: list[float], expected: float) -> None:
    got = explained_variance(column([1.0, 0.0, 1.0]), column(values), torch.ones(3, dtype=torch.bool))
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("returns", [[], [0.1], [0.1, 0.1, 0.1]], ids=["no token", "one token", "all the same"])
def test_explained_variance_of_returns_that_do_not_vary_is_nan(returns: list[float]) -> None:
    values, mask = torch.rand(len(returns)), torch.ones(len(returns), dtype=torch.bool)
    assert math.isnan(explained_variance(column(returns), values.double(), mask))
    assert math.isnan(explained_variance(column(returns).float(), values, mask))
