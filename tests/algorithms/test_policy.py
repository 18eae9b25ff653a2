"""Ratios and clips: the worked numbers of ALGORITHMS.md 5.1 to 5.3 on F1."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.aggregation import aggregation_weights
from burnish.algorithms.policy import logprob_loss, no_clip, ppo_clip, token_ratio
from burnish.core.batch import Batch

NUM_TOKENS = 13


def actions(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """new, old and advantages at the 13 written tokens."""
    mask = batch.action_mask
    return (
        batch.token["new"][mask],
        batch.token["old_logp"][mask],
        batch.sequence["advantages"][batch.sequence_ids[mask]],
    )


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


def test_token_ratios(f1: Batch) -> None:
    new, old, _ = actions(f1)
    expected = [1.221403, 0.67032, 1.648721, 1, 0.818731, 1.822119, 3.669297, 0.22313, 1.349859, 3.320117, 1, 1.105171, 0.740818]  # fmt: skip
    close(token_ratio(new, old), expected)


@pytest.mark.parametrize("gap", [25.0, 1e6])
def test_an_absurd_token_neither_overflows_nor_has_a_gradient(gap: float) -> None:
    logp = torch.tensor([0.0, -gap], dtype=torch.float64, requires_grad=True)
    ratio = token_ratio(logp, torch.tensor([-gap, 0.0], dtype=torch.float64))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-12)
    ratio.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [0.0, 0.0]


PPO = [-1.2, -0.67032, -1.2, -1, 0.818731, 1.822119, 2.935437, 0.64, 1.079887, -0.72, -0.6, -0.663103, -0.444491]


def test_ppo_clip(f1: Batch) -> None:
    new, old, advantages = actions(f1)
    loss, marks = ppo_clip(token_ratio(new, old), advantages)
    close(loss, PPO)
    assert set(marks) == {"pg_clipfrac"}
    assert float(marks["pg_clipfrac"].double().mean()) == pytest.approx(0.307692, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.061405),
        ("token-sum", 0.79826),
        ("seq-mean-token-sum", 0.199565),
        ("seq-mean-token-mean", 0.31193),
        ("seq-mean-token-sum-norm", 0.049891),
    ],
)
def test_ppo_clip_under_every_aggregation(f1: Batch, mode: str, expected: float) -> None:
    new, old, advantages = actions(f1)
    weights = aggregation_weights(f1, mode, 4)[f1.action_mask]
    loss, _ = ppo_clip(token_ratio(new, old), advantages)
    assert float((weights * loss).sum()) == pytest.approx(expected, abs=1e-6)


DUAL_GRADIENT = [0, -0.051563, 0, -0.076923, 0.062979, 0.140163, 0, 0, 0.083068, 0, -0.046154, -0.051008, -0.034192]


def test_dual_clip_values_metric_and_gradient(f1: Batch) -> None:
    new, old, advantages = actions(f1)
    new.requires_grad_()
    loss, marks = ppo_clip(token_ratio(new, old), advantages, dual=3.0)
    close(loss.detach(), [*PPO[:6], 2.4, *PPO[7:]])
    assert loss.mean().item() == pytest.approx(0.020217, abs=1e-6)
    assert float(marks["pg_clipfrac_lower"].double().mean()) == pytest.approx(0.076923, abs=1e-6)
    assert float(marks["pg_clipfrac"].double().mean()) == pytest.approx(0.307692, abs=1e-6)
    loss.mean().backward()
    assert new.grad is not None
    close(new.grad, DUAL_GRADIENT)


def test_clip_higher(f1: Batch) -> None:
    new, old, advantages = actions(f1)
    loss, _ = ppo_clip(token_ratio(new, old), advantages, low=0.2, high=0.28, dual=10.0)
    close(loss[:4], [-1.221403, -0.67032, -1.28, -1])
    assert loss.mean().item() == pytest.approx(0.049912, abs=1e-6)


@given(st.floats(-20, 20), st.floats(-3, 3), st.floats(1.3, 10))
def test_dual_clip_is_the_two_sided_clip(log_ratio: float, advantage: float, bound: float) -> None:
    """INTELLECT-2 replaces r by min(r, delta): the same function with dual = delta when delta >= 1 + high."""
    ratio = math.exp(log_ratio)
    r, a = torch.tensor([ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    two_sided = max(-advantage * min(ratio, bound), -advantage * min(max(ratio, 0.8), 1.2))
    assert float(ppo_clip(r, a, dual=bound)[0]) == pytest.approx(two_sided, rel=1e-12, abs=1e-12)


def test_no_clip_is_the_plain_surrogate(f1: Batch) -> None:
    new, old, advantages = actions(f1)
    loss, marks = no_clip(token_ratio(new, old), advantages)
    expected = [-1.221403, -0.67032, -1.648721, -1, 0.818731, 1.822119, 2.935437, 0.178504, 1.079887, -1.99207, -0.6, -0.663103, -0.444491]  # fmt: skip
    close(loss, expected)
    assert marks == {}


def test_logprob_loss(f1: Batch) -> None:
    new, _, advantages = actions(f1)
    close(logprob_loss(new, advantages), [0.8, 0.9, 1.5, 0.1, -0.9, -0.6, -0.4, -1.92, -0.96, 0.6, 0.24, 0.3, 0.84])


@pytest.mark.parametrize("options", [{}, {"dual": 3.0}, {"low": 0.1, "high": 0.28}])
def test_on_policy_every_clip_has_the_gradient_of_plain_policy_gradient(f1: Batch, options: dict[str, float]) -> None:
    _, old, advantages = actions(f1)
    for clip in (lambda r: ppo_clip(r, advantages, **options)[0], lambda r: no_clip(r, advantages)[0]):
        logp = old.clone().requires_grad_()
        clip(token_ratio(logp, old)).sum().backward()
        assert logp.grad is not None
        torch.testing.assert_close(logp.grad, -advantages, atol=1e-12, rtol=0)
