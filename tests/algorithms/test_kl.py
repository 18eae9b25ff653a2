"""KL estimators: the worked numbers of ALGORITHMS.md 3.1 and 3.2, and their gradients by enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.aggregation import aggregation_weights
from burnish.algorithms.kl import kl_estimate, kl_reward
from burnish.core.batch import Batch

P = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
TRUE_GRADIENT = [0.175945, -0.098118, -0.077827]


def number(logp: float, ref: float, estimator: str) -> float:
    return float(
        kl_estimate(torch.tensor(logp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64), estimator)
    )


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "above", "below"),
    [("k1", 0.5, -0.5), ("abs", 0.5, 0.5), ("k2", 0.125, 0.125), ("k3", 0.106531, 0.148721)],
)
def test_values_on_either_side_of_the_reference(estimator: str, above: float, below: float) -> None:
    for name in (estimator, estimator + "+") if estimator != "k2" else (estimator,):
        assert number(-1.0, -1.5, name) == pytest.approx(above, abs=1e-6)
        assert number(-1.5, -1.0, name) == pytest.approx(below, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "mean"), [("k1", 0.1), ("abs", 0.438462), ("k2", 0.178077), ("k3", 0.209463), ("k3+", 0.209463)]
)
def test_token_means_on_f1(f1: Batch, estimator: str, mean: float) -> None:
    values = kl_estimate(f1.token["new"], f1.token["ref_logp"], estimator)[f1.action_mask]
    assert float(values.mean()) == pytest.approx(mean, abs=1e-6)


def test_k3_under_the_mean_of_sequence_means(f1: Batch) -> None:
    weights = aggregation_weights(f1, "seq-mean-token-mean")
    values = kl_estimate(f1.token["new"], f1.token["ref_logp"], "k3")
    assert float((weights * values)[f1.action_mask].sum()) == pytest.approx(0.217444, abs=1e-6)


K2_GRADIENT = [0.3, -0.3, 0.3, 0.1, -0.1, 0.4, 1, -1.4, 0.2, 1, 0.1, 0.1, -0.4]
K3_GRADIENT = [0.259182, -0.349859, 0.259182, 0.095163, -0.105171, 0.32968, 0.632121, -3.0552, 0.181269, 0.632121, 0.095163, 0.095163, -0.491825]  # fmt: skip


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k3", K3_GRADIENT), ("k2", K2_GRADIENT), ("k1+", K2_GRADIENT), ("abs+", K2_GRADIENT), ("k3+", K2_GRADIENT)],
)
def test_gradients_on_f1(f1: Batch, estimator: str, expected: list[float]) -> None:
    logp = f1.token["new"][f1.action_mask].requires_grad_()
    kl_estimate(logp, f1.token["ref_logp"][f1.action_mask], estimator).sum().backward()
    assert logp.grad is not None
    close(logp.grad, expected)


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
@pytest.mark.parametrize(("logp", "ref"), [(-4.0, -1.0), (-1e4, -1.0), (-1.0, -1e4), (-1.0, -31.0)])
def test_k3_is_at_most_10_however_far_the_policies_are(estimator: str, logp: float, ref: float) -> None:
    assert number(logp, ref, estimator) == 10


@pytest.mark.parametrize(("logp", "ref"), [(-4.0, -1.0), (-1e4, -1.0), (-1.0, -1e4)])
def test_k3_has_no_gradient_where_it_is_clipped(logp: float, ref: float) -> None:
    x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    kl_estimate(x, torch.tensor(ref, dtype=torch.float64), "k3").backward()
    assert x.grad == 0


def expected_gradient(estimator: str) -> Tensor:
    """The gradient in the policy's logits, averaged exactly over the samples the policy would draw."""
    logits = P.log().requires_grad_()
    logp = logits.log_softmax(0)
    (P * kl_estimate(logp, Q.log(), estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k2", TRUE_GRADIENT),
        ("k1+", TRUE_GRADIENT),
        ("abs+", TRUE_GRADIENT),
        ("k3+", TRUE_GRADIENT),
        ("k1", [0.0, 0.0, 0.0]),
        ("k3", [0.2, -0.1, -0.1]),
    ],
)
def test_expected_gradients_by_enumeration(estimator: str, expected: list[float]) -> None:
    close(expected_gradient(estimator), expected)


def test_the_gradient_called_true_is_that_of_the_exact_kl() -> None:
    logits = P.log().requires_grad_()
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - Q.log())).sum()
    exact.backward()
    assert float(exact.detach()) == pytest.approx(0.085123, abs=1e-6)
    assert logits.grad is not None
    close(logits.grad, TRUE_GRADIENT)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_values(estimator: str) -> None:
    exact = sum(p * math.log(p / q) for p, q in zip(P.tolist(), Q.tolist(), strict=True))
    assert float((P * kl_estimate(P.log(), Q.log(), estimator)).sum()) == pytest.approx(exact, abs=1e-12)


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative_and_zero_at_the_reference(logp: float, ref: float) -> None:
    assert number(logp, ref, "k3") >= 0
    assert number(ref, ref, "k3") == 0


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4'"):
        number(-1, -1, "k4")


# --- in the reward -----------------------------------------------------------------------------------------------------

SHAPED = [-0.01, -0.01, 0.02, 0.99, -0.01, 0.02, 0.03, -0.01, 0.01, 0.02, -0.01, 0, 1.01]


def test_kl_in_the_reward_on_f1(f1: Batch) -> None:
    rewards, current = kl_reward(f1, f1.token["token_rewards"], "k1", 0.1)
    close(rewards[f1.action_mask], SHAPED)
    assert rewards[~f1.action_mask].tolist() == [0.0] * 4
    assert current == pytest.approx(-0.04375, abs=1e-9)


def test_the_logged_kl_does_not_depend_on_the_coefficient_and_leaves_out_rows_nothing_was_written_in(f1: Batch) -> None:
    emptied = f1.with_token(action_mask=f1.action_mask & (f1.sequence_ids != 3))
    # Row means of OLD - REF are 0.025, -0.05, -0.1, -0.05; without the last row their mean is -0.125 / 3.
    for coef in (0.1, 5.0):
        assert kl_reward(emptied, f1.token["token_rewards"], "k1", coef)[1] == pytest.approx(-0.125 / 3, abs=1e-9)
