"""The optimal value of a prompt: ALGORITHMS-2026.md N3.5 and N9, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from burnish.algorithms.advantages.offline_values import offline_value, optimal_value
from burnish.algorithms.spec import Algorithm
from burnish.config.errors import UserError
from tests.algorithms.advantages.test_group_relative import close, with_rewards

ASTAR = {
    "ratio": "none",
    "clip": "none",
    "advantage": "offline_value",
    "loss": "astar_sq",
    "kl": {"reference": "frozen"},
}


def test_the_worked_values() -> None:
    assert optimal_value([1, 0, 0, 1, 0, 0, 0, 0], 0.5) == pytest.approx(0.477229, abs=1e-5)
    for successes, expected in ((0, 0), (1, 0.293513), (4, 0.71689), (8, 1)):
        assert optimal_value([1] * successes + [0] * (8 - successes), 0.5) == pytest.approx(expected, abs=1e-5)
    batch = with_rewards([1, 0, 0.5], [0, 1, 2])
    values = torch.tensor([0.7, 0.7, 0.3], dtype=torch.float64)
    close(offline_value(batch.with_sequence(prompt_value=values)), [0.3, -0.7, 0.2])
    with pytest.raises(UserError, match="needs the value of every prompt"):
        offline_value(batch)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=8), st.floats(0.05, 20))
def test_the_value_lies_between_the_mean_and_the_maximum(rewards: list[float], beta: float) -> None:
    mean, best = sum(rewards) / len(rewards), max(rewards)
    assert mean - 1e-9 <= optimal_value(rewards, beta) <= best + 1e-9
    assert optimal_value(rewards, 1e7) == pytest.approx(mean, abs=1e-5)
    assert optimal_value(rewards, 1e-6) == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shaping": ["signed"]}, "values of rewards that are not shaped"),
        ({"kl": {"reward": {"coef": 0.1}, "reference": "frozen"}}, "values of rewards that are not shaped"),
        ({"curriculum": "prioritised"}, r"set algorithm\.curriculum=none"),
        ({"kl": {}}, r"compares with a reference but kl\.reference is none"),
        ({"kl": {"reference": "rollout"}}, r"set algorithm\.kl\.reference=frozen"),
        ({"aggregation": "token-mean"}, "seq-mean-token-mean"),
        ({"advantage": "grpo"}, "goes with advantage offline_value"),
    ],
)
def test_what_does_not_go_with_it_is_refused(change: dict[str, Any], words: str) -> None:
    assert Algorithm.model_validate(ASTAR)
    with pytest.raises(ValidationError, match=words):
        Algorithm.model_validate({**ASTAR, **change})
