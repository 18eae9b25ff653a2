"""Demonstrations beside the policy's samples: the worked numbers of ALGORITHMS.md 6.4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from burnish.algorithms.losses.spec import MixedLoss
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import mixed_offpolicy


@pytest.fixture(scope="module")
def mixed(f1: Batch) -> Batch:
    """Rows 0 to 2 are samples, row 3 is a demonstration; what each kind of token does not have is NaN."""
    demo = torch.tensor([False, False, False, True])
    nan = torch.full_like(f1.token["new"], torch.nan)
    own = ~demo[f1.sequence_ids]
    return f1.with_token(
        old_logp=torch.where(own, f1.token["old_logp"], nan), author_logp=torch.where(own, nan, f1.token["ref_logp"])
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


def test_known_authors_give_a_ratio(mixed: Batch, evaluate: Any) -> None:
    result = evaluate(mixed_offpolicy, mixed, weight="author")
    p, q = (mixed.token[name][mixed.loss_mask][-4:].exp() for name in ("new", "author_logp"))
    torch.testing.assert_close(result.per_token[-4:], -0.5 * p / (q + 1e-6), atol=1e-12, rtol=0)
    assert bool(result.gradient.isfinite().all())


def test_unknown_authors_share_a_mixture_with_the_old_policy(mixed: Batch, f1: Batch, evaluate: Any) -> None:
    """2 p / (p_old + (p_old + 1) / 2): by hand for p_old = exp(-2.2), p = exp(-1)."""
    result = evaluate(mixed_offpolicy, mixed.with_token(old_logp=f1.token["old_logp"]), "token-sum", weight="mixture")
    p, old = (f1.token[name][f1.loss_mask][-4:].exp() for name in ("new", "old_logp"))
    torch.testing.assert_close(result.per_token[-4:], -0.5 * 2 * p / (old + 0.5 * (old + 1)), atol=1e-12, rtol=0)
    assert float(result.per_token[-4]) == pytest.approx(-0.5 * 1.104404, abs=1e-6)
    torch.testing.assert_close(
        result.gradient[-4:], result.per_token[-4:], atol=1e-12, rtol=0
    )  # the weight is linear in p


def test_focus_looks_away_from_likely_tokens_without_a_gradient_of_its_own(mixed: Batch, evaluate: Any) -> None:
    plain, focused = (evaluate(mixed_offpolicy, mixed, focus=focus) for focus in (0.0, 0.5))
    scale = (1 - mixed.token["new"][mixed.loss_mask][-4:].exp()) ** 0.5
    for name in ("per_token", "gradient"):
        one, other = getattr(plain, name), getattr(focused, name)
        torch.testing.assert_close(other[-4:], one[-4:] * scale, atol=1e-12, rtol=0)
        torch.testing.assert_close(other[:9], one[:9], atol=0, rtol=0)


def test_a_clip_bounds_the_policys_own_tokens_alone(mixed: Batch, evaluate: Any) -> None:
    plain, clipped = (evaluate(mixed_offpolicy, mixed, clip=clip) for clip in (None, 0.2))
    advantages = torch.tensor([0.5] * 4 + [-0.5] * 5, dtype=torch.float64)
    ratio = (mixed.token["new"] - mixed.token["old_logp"])[mixed.loss_mask].exp()[:9]
    expected = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(clipped.per_token[:9], expected, atol=1e-12, rtol=0)
    assert bool((clipped.per_token[:9] > plain.per_token[:9]).any())
    torch.testing.assert_close(clipped.per_token[-4:], plain.per_token[-4:], atol=0, rtol=0)


def test_a_batch_without_demonstrations_needs_no_column(mixed: Batch, f1: Batch, evaluate: Any) -> None:
    alone = f1.with_sequence(advantages=mixed.sequence["advantages"])
    nobody = alone.with_sequence(demonstration=torch.zeros(4, dtype=torch.bool))
    one, other = (evaluate(mixed_offpolicy, batch) for batch in (alone, nobody))
    torch.testing.assert_close(one.per_token, other.per_token, atol=0, rtol=0)


def test_a_sample_far_from_its_anchor_is_clamped(mixed: Batch, evaluate: Any) -> None:
    far = mixed.with_token(old_logp=torch.full_like(mixed.token["new"], -60.0))
    result = evaluate(mixed_offpolicy, far)
    assert float(result.per_token[0]) == pytest.approx(-0.5 * float(torch.tensor(20.0).double().exp()), rel=1e-12)
    assert float(result.gradient[0]) == 0


def test_gamma_without_effect_is_refused() -> None:
    assert MixedLoss(gamma=0.2).gamma == 0.2
    with pytest.raises(ValidationError, match="with weight author it does nothing"):
        MixedLoss(gamma=0.2, weight="author")
