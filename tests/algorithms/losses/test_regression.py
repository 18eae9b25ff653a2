"""Squared losses: the worked numbers of ALGORITHMS.md 6.1, 6.2 and 16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_functions import sequence_log_ratio
from burnish.algorithms.losses.loss_view import loss_view
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import astar_sq, dro, omd_sq, sppo_sq

R = torch.tensor([1.0, 0, 0, 1], dtype=torch.float64)
Z = torch.tensor([0.3, 0.4, 0.1, 1.0], dtype=torch.float64)
LENGTHS = torch.tensor([4, 2, 3, 4])


def with_advantages(batch: Batch, advantages: Tensor) -> Batch:
    return batch.with_sequence(advantages=advantages)


def soft_mean(rewards: Tensor, beta: float) -> float:
    return float((rewards * beta).exp().mean().log() / beta)


def rows(values: list[float]) -> Tensor:
    """A number a sequence, at each of its tokens."""
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), LENGTHS)


def close(got: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def test_the_log_ratio_of_a_sequence_is_a_sum(f1: Batch) -> None:
    view = loss_view(f1, f1.token["new"][f1.loss_mask])
    close(sequence_log_ratio(view, view.column("old_logp")), Z, atol=1e-12)


def test_mirror_descent_with_the_mean_baseline(f1: Batch, evaluate: Any) -> None:
    result = evaluate(omd_sq, with_advantages(f1, R - R.mean()), tau=0.5)
    assert result.value == pytest.approx(-0.02125, abs=1e-9)
    # dL/dlogp is the same on every token of a row; aggregation spreads the row's loss, not its derivative.
    close(result.gradient, rows([-0.0875, 0.175, 0.1375, 0.0]))
    # The squared loss is 2 tau L plus the constant it leaves out.
    assert 2 * 0.5 * result.value + float((R - R.mean()).square().mean()) == pytest.approx(0.22875, abs=1e-9)


def test_mirror_descent_with_the_soft_baseline(f1: Batch, evaluate: Any) -> None:
    baseline = soft_mean(R, beta=1 / 0.5)
    assert baseline == pytest.approx(0.71689, abs=1e-5)
    result = evaluate(omd_sq, with_advantages(f1, R - baseline), tau=0.5)
    assert 2 * 0.5 * result.value + float((R - baseline).square().mean()) == pytest.approx(0.373392, abs=1e-6)


def test_mirror_descent_rests_where_tau_z_is_the_advantage(f1: Batch, evaluate: Any) -> None:
    assert evaluate(omd_sq, with_advantages(f1, 0.3 * Z), tau=0.3).gradient.abs().max() < 1e-12
    assert evaluate(omd_sq, with_advantages(f1, 0.3 * Z), tau=0.4).gradient.abs().max() > 1e-3


def test_mirror_descent_on_policy_is_plain_policy_gradient_of_whole_sequences(f1: Batch, evaluate: Any) -> None:
    fresh = f1.with_token(old_logp=f1.token["new"])
    a = fresh.sequence["advantages"]
    close(evaluate(omd_sq, fresh, tau=0.7).gradient, rows((-a / 4).tolist()), atol=1e-12)


def test_self_play_with_win_probabilities(f1: Batch, evaluate: Any) -> None:
    wins = torch.tensor([0.9, 0.2, 0.4, 0.7], dtype=torch.float64)
    assert evaluate(sppo_sq, with_advantages(f1, wins - 0.5)).value == pytest.approx(0.295, abs=1e-9)


def test_self_play_with_rewards(f1: Batch, evaluate: Any) -> None:
    baseline = soft_mean(R, beta=1.0)
    assert baseline == pytest.approx(0.620115, abs=1e-6)
    assert evaluate(sppo_sq, with_advantages(f1, R - baseline)).value == pytest.approx(0.487531, abs=1e-6)


@pytest.mark.parametrize("eta", [1.0, 0.5, 1000.0])
def test_self_play_is_mirror_descent_of_temperature_one_over_eta(f1: Batch, evaluate: Any, eta: float) -> None:
    # (z - eta A)^2 = 2 eta (-A z + z^2 / (2 eta)) + constant
    one, other = evaluate(sppo_sq, f1, eta=eta), evaluate(omd_sq, f1, tau=1 / eta)
    torch.testing.assert_close(one.gradient, 2 * eta * other.gradient, atol=1e-9, rtol=1e-12)


def test_advantages_that_differ_inside_a_sequence_count_with_their_mean(f1: Batch, evaluate: Any) -> None:
    uneven = torch.linspace(-1, 1, f1.num_tokens, dtype=torch.float64)
    means = [float(uneven[f1.loss_mask & (f1.sequence_ids == i)].mean()) for i in range(4)]
    token = f1.with_token(advantages=uneven)
    constant = with_advantages(f1, torch.tensor(means, dtype=torch.float64))
    assert evaluate(omd_sq, token).value == pytest.approx(evaluate(omd_sq, constant).value, abs=1e-12)


def test_the_metric_is_clipped_where_the_loss_is_not(f1: Batch, evaluate: Any) -> None:
    far = f1.with_token(new=f1.token["old_logp"] - 100.0)
    result = evaluate(omd_sq, with_advantages(far, torch.zeros(4, dtype=torch.float64)), tau=2.0)
    assert result.metrics["seq_log_ratio"] == -50
    assert result.value == pytest.approx(float((100.0 * LENGTHS.double()).square().mean()), rel=1e-12)


def test_token_level_regression(f1: Batch, evaluate: Any) -> None:
    result = evaluate(dro, f1, "token-mean", beta=0.5)
    assert result.value == pytest.approx(0.161923, abs=1e-6)
    drift = (f1.token["new"] - f1.token["old_logp"])[f1.loss_mask]
    close(result.gradient, (-rows([1.0, -1.0, -0.8, 0.6]) + 0.5 * drift) / 13, atol=1e-12)


def test_token_level_regression_does_not_clamp(f1: Batch, evaluate: Any) -> None:
    far = with_advantages(f1.with_token(old_logp=f1.token["new"] + 30.0), torch.zeros(4, dtype=torch.float64))
    result = evaluate(dro, far, "token-mean", beta=0.2)
    assert result.value == pytest.approx(0.1 * 900, rel=1e-12)
    close(result.gradient, torch.full((13,), 0.2 * -30 / 13, dtype=torch.float64), atol=1e-12)


# --- A*-PO: ALGORITHMS-2026.md N3.5 and N9 -----------------------------------------------------------------------------


def test_a_star_regression(f1: Batch, evaluate: Any) -> None:
    """z to the reference is [0.4, 0.3, -0.2, 0.8]; the values of the two prompts are 0.7 and 0.3."""
    advantages = R - torch.tensor([0.7, 0.7, 0.3, 0.3], dtype=torch.float64)
    batch = with_advantages(f1.with_token(old_logp=f1.token["ref_logp"]), advantages)
    assert evaluate(astar_sq, batch).value == pytest.approx(0.289735, abs=1e-5)
    result = evaluate(astar_sq, batch, beta=0.1)
    assert result.value == pytest.approx(0.265825, abs=1e-5)
    close(result.gradient, rows([-0.013, 0.0365, 0.014, -0.031]), atol=1e-6)
    assert 0.01 * evaluate(sppo_sq, batch, eta=10.0).value == pytest.approx(result.value)
    z = torch.tensor([0.4, 0.3, -0.2, 0.8], dtype=torch.float64)
    assert evaluate(astar_sq, with_advantages(batch, 0.1 * z), beta=0.1).gradient.abs().max() < 1e-12
