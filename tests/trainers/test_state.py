"""The trainer state: controllers and moving mean reward."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.algorithms.spec import Algorithm
from burnish.trainers.state import advance, entropy_coefficient, initial_state

STEERED_KL = {
    "advantage": "gae",
    "critic": {},
    "kl": {
        "reward": {"estimator": "k1", "coef": 0.2},
        "adaptive": {"target": 6.0, "horizon": 10000},
        "reference": "frozen",
    },
}


def algorithm(tree: dict[str, Any]) -> Algorithm:
    return Algorithm.model_validate(tree)


@pytest.mark.parametrize(("kl", "coef"), [(9.0, 0.201024), (5.4, 0.199488)])
def test_the_kl_coefficient_follows_the_kl(kl: float, coef: float) -> None:
    it = algorithm(STEERED_KL)
    state = advance(initial_state(it), it, {"kl_reward": kl}, 256)
    assert state.kl_coef == pytest.approx(coef, abs=1e-6)
    assert state.step == 1


def test_a_step_that_measured_nothing_moves_no_controller() -> None:
    it = algorithm(STEERED_KL)
    assert advance(initial_state(it), it, {}, 0).kl_coef == 0.2


def test_the_entropy_bonus_is_on_only_at_or_below_its_target() -> None:
    it = algorithm({"entropy": {"coef": 0.005, "adaptive": {"target": 0.3, "delta": 0.005}}})
    state = initial_state(it)
    assert entropy_coefficient(state, it) == 0
    low = advance(state, it, {"entropy": 0.2}, 8)
    assert entropy_coefficient(low, it) == pytest.approx(0.01)
    high = advance(state, it, {"entropy": 0.9}, 8)
    assert (high.entropy_coef, entropy_coefficient(high, it)) == (0, 0)


def test_what_is_fixed_has_no_state() -> None:
    it = algorithm({"entropy": {"coef": 0.01}})
    state = advance(initial_state(it), it, {"entropy": 0.1, "kl_reward": 3.0}, 8)
    assert (state.kl_coef, state.entropy_coef) == (None, None)
    assert entropy_coefficient(state, it) == 0.01


def test_the_mean_reward_moves_by_a_tenth() -> None:
    it = algorithm({})
    state = advance(initial_state(it), it, {"reward": 1.0}, 8)
    assert state.reward_mean == 1.0
    state = advance(state, it, {"reward": 0.0}, 8)
    assert state.reward_mean == pytest.approx(0.9)
    assert advance(state, it, {}, 8).reward_mean == pytest.approx(0.9)
