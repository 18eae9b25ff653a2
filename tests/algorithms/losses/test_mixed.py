"""Demonstrations beside the policy's samples: the worked numbers of ALGORITHMS.md 6.4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from burnish.algorithms.losses.mixed import mixed_offpolicy
from burnish.config.slots.losses import MixedLoss
from burnish.core.batch import Batch


@pytest.fixture(scope="module")
def mixed(f1: Batch) -> Batch:
    """Rows 0 to 2 are samples, row 3 is a demonstration; what each kind of token does not have is NaN."""
    demo = torch.tensor([False, False, False, True])
    nan = torch.full_like(f1.token["new"], torch.nan)
    own = ~demo[f1.sequence_ids]
    return f1.with_token(
        old_logp=torch.where(own, f1.token["old_logp"], nan), teacher_logp=torch.where(own, nan, f1.token["ref_logp"])
    ).with_sequence(demonstration=demo, advantages=torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64))


def test_shaped_probabilities(mixed: Batch, evaluate: Any) -> None:
    shaped = evaluate(mixed_offpolicy, mixed).per_token[-4:] / -0.5
    expected = torch.tensor([0.78627, 0.870184, 0.858463, 0.71148], dtype=torch.float64)
    torch.testing.assert_close(shaped, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 0.004473), ("seq-mean-token-sum-norm", 0.003634)])
def test_loss(mixed: Batch, evaluate: Any, mode: str, expected: float) -> None:
    assert evaluate(mixed_offpolicy, mixed, mode).value == pytest.approx(expected, abs=1e-6)


def test_gradient_on_both_kinds_of_tokens(mixed: Batch, evaluate: Any) -> None:
    gradient = evaluate(mixed_offpolicy, mixed, "token-mean").gradient
    expected = torch.tensor([-0.006463, -0.004345, -0.004673, -0.007895], dtype=torch.float64)
    torch.testing.assert_close(gradient[-4:], expected, atol=1e-6, rtol=0)
    ratio = (mixed.token["new"] - mixed.token["old_logp"])[mixed.loss_mask].exp()[:9]
    advantages = torch.tensor([0.5] * 4 + [-0.5] * 5, dtype=torch.float64)
    torch.testing.assert_close(gradient[:9], -advantages * ratio / 13, atol=1e-12, rtol=0)


def test_the_shape_pulls_hardest_where_the_probability_is_gamma(mixed: Batch, evaluate: Any) -> None:
    likely = torch.linspace(0.01, 0.9, mixed.num_tokens, dtype=torch.float64).log()
    demos = mixed.with_token(new=likely).with_sequence(demonstration=torch.ones(4, dtype=torch.bool))
    demos = demos.with_sequence(advantages=torch.ones(4, dtype=torch.float64))
    pull = -evaluate(mixed_offpolicy, demos, "token-sum", gamma=0.3).gradient
    p = likely[mixed.loss_mask].exp()
    torch.testing.assert_close(pull, p * 0.3 / (p + 0.3) ** 2, atol=1e-12, rtol=0)
    assert float(p[pull.argmax()]) == pytest.approx(0.3, abs=0.06)


def test_known_teachers_give_a_ratio(mixed: Batch, evaluate: Any) -> None:
    result = evaluate(mixed_offpolicy, mixed, teacher=True)
    p, q = (mixed.token[name][mixed.loss_mask][-4:].exp() for name in ("new", "teacher_logp"))
    torch.testing.assert_close(result.per_token[-4:], -0.5 * p / (q + 1e-6), atol=1e-12, rtol=0)
    assert bool(result.gradient.isfinite().all())


def test_a_sample_far_from_its_anchor_is_clamped(mixed: Batch, evaluate: Any) -> None:
    far = mixed.with_token(old_logp=torch.full_like(mixed.token["new"], -60.0))
    result = evaluate(mixed_offpolicy, far)
    assert float(result.per_token[0]) == pytest.approx(-0.5 * float(torch.tensor(20.0).double().exp()), rel=1e-12)
    assert float(result.gradient[0]) == 0


def test_gamma_without_effect_is_refused() -> None:
    assert MixedLoss(gamma=0.2).gamma == 0.2
    assert MixedLoss(teacher=True).teacher
    with pytest.raises(ValidationError, match="with teacher=true it does nothing"):
        MixedLoss(gamma=0.2, teacher=True)
