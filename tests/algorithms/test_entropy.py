"""Entropy: the worked numbers of ALGORITHMS.md 5.12 and 8."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from burnish.algorithms.terms.loss_terms import adapt_entropy_coefficient, top_entropy_mask
from burnish.algorithms.terms.spec import Entropy


def test_the_bonus_grows_while_entropy_is_low_and_rests_above_the_target() -> None:
    assert adapt_entropy_coefficient(0.005, 0.1, target=0.2, delta=0.005) == (0.01, True)
    assert adapt_entropy_coefficient(0.005, 0.3, target=0.2, delta=0.005) == (0.0, False)
    assert adapt_entropy_coefficient(0.005, 0.2, target=0.2, delta=0.005) == (0.01, True)


def test_the_coefficient_stops_at_zero() -> None:
    assert adapt_entropy_coefficient(0.003, 0.3, target=0.2, delta=0.005) == (0.0, False)


def test_the_top_fifth_of_ten_tokens() -> None:
    entropy = torch.tensor([0.5, 3.0, 0.1, 2.0, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8])
    assert top_entropy_mask(entropy, 0.2).nonzero().flatten().tolist() == [1, 3]


def test_ties_at_the_threshold_are_all_kept() -> None:
    assert top_entropy_mask(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5]), 0.2).tolist() == [False, True, True, True, False]
    assert bool(top_entropy_mask(torch.ones(7), 0.1).all())


@given(
    st.lists(st.integers(0, 96), min_size=1, max_size=40),
    st.sampled_from([0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]),
)
def test_the_threshold_is_the_quantile_and_something_always_learns(eighths: list[int], share: float) -> None:
    entropy = torch.tensor(eighths, dtype=torch.float64) / 8
    mask = top_entropy_mask(entropy, share)
    # Interpolation may round up past a value it should meet: allow the quantile that much.
    assert torch.equal(mask, entropy >= torch.quantile(entropy, 1 - share) - 1e-9)
    assert bool(mask[entropy.argmax()])
    assert share < 1 or bool(mask.all())


def test_no_tokens_give_no_mask_and_the_gradient_is_left_alone() -> None:
    assert top_entropy_mask(torch.zeros(0), 0.2).shape == (0,)
    assert not top_entropy_mask(torch.rand(4, requires_grad=True), 0.5).requires_grad


def test_the_entropy_change_of_a_small_step_is_the_covariance_it_is_named_after() -> None:
    """Exact enumeration: a policy-gradient step on softmax logits changes H by -eta Cov(log pi, pi A)."""
    logits = torch.tensor([0.5, -0.3, 1.1, 0.0], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64)
    p = logits.softmax(0)
    advantage = reward - (p * reward).sum()
    eta = 1e-6

    def entropy(x: torch.Tensor) -> torch.Tensor:
        return -(x.softmax(0) * x.log_softmax(0)).sum()

    change = float(entropy(logits + eta * p * advantage) - entropy(logits)) / eta
    x, y = p.log(), p * advantage
    covariance = float((p * x * y).sum() - (p * x).sum() * (p * y).sum())
    assert change == pytest.approx(-covariance, rel=1e-4)
    assert not math.isclose(covariance, 0, abs_tol=1e-3)


def test_the_record() -> None:
    record = Entropy.model_validate({"adaptive": {"target": 0.3}, "top_share": 0.2})
    assert record.adaptive is not None
    assert (record.adaptive.target, record.adaptive.delta) == (0.3, 0.005)
    for wrong in (0.0, 1.5):
        with pytest.raises(ValidationError):
            Entropy(top_share=wrong)
