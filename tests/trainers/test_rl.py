"""One step of the loop on made-up rollouts: what is logged, and what is said when there is nothing to learn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.config.algorithm import Algorithm
from burnish.config.schema import Training
from burnish.core.batch import Batch
from burnish.core.trajectory import Finish, TokenSequence, Trajectory
from burnish.rollout.scored import Scored
from burnish.trainers import observe
from burnish.trainers.prepare import Recipe
from burnish.trainers.rl import learn
from burnish.training.learner import Update


class Model:
    """Stands where the learner and the reference stand: every written token has the same log-prob."""

    device = torch.device("cpu")

    def __init__(self, logp: float) -> None:
        self.logp = logp

    def logprobs(self, batch: Batch) -> Tensor:
        return torch.where(batch.action_mask, self.logp, 0.0)

    def update(self, batch: Batch, loss: Any) -> Update:
        return Update({"loss": 1.0}, self.logprobs(batch), None)


def rollouts(finish: Finish, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> Scored:
    """One group of samples of a prompt token and three written ones."""
    mask = np.array([False, True, True, True])
    tokens = TokenSequence(np.arange(4), mask, np.full(4, -0.5, np.float32) * mask, np.zeros(4, np.int32))
    samples = [Trajectory("p", 0, k, [tokens], finish, "", reward, reward) for k, reward in enumerate(rewards)]
    return Scored([], samples, 0.0, 0.0)


def job(algorithm: dict[str, Any], notes: list[str]) -> Any:
    recipe = Recipe(Algorithm.model_validate(algorithm), horizon=3, num_updates=1)
    display = SimpleNamespace(note=notes.append, phase=lambda text: None)
    return SimpleNamespace(
        config=SimpleNamespace(training=Training()),
        run=SimpleNamespace(display=display),
        state=SimpleNamespace(step=6),
        recipe=recipe,
        learner=Model(-0.5),
        reference=Model(-0.75) if recipe.needs_reference else None,
    )


def test_kl_in_the_reward_is_among_the_metrics() -> None:
    notes: list[str] = []
    algorithm = {"kl": {"reward": {"estimator": "k1", "coef": 0.1}, "reference": "frozen"}}
    sampled = rollouts("stop")
    batch, updates, prepared = learn(cast(Any, job(algorithm, notes)), sampled)
    values = observe.step_values(sampled, batch, updates, prepared, step_s=2.0)
    assert values["actor/kl_reward"] == pytest.approx(0.25)
    assert values["actor/updates"] == 1
    assert values["mismatch/max"] == 0
    assert notes == []


def test_a_step_whose_samples_were_all_filtered_out_makes_no_update_and_says_why() -> None:
    notes: list[str] = []
    sampled = rollouts("length")
    batch, updates, prepared = learn(cast(Any, job({"filters": ["overlong"]}, notes)), sampled)
    assert updates == []
    assert len(notes) == 1
    assert "step 7: no update" in notes[0]
    assert "all 2 sequences" in notes[0]
    values = observe.step_values(sampled, batch, updates, prepared, step_s=2.0)
    assert (values["rollout/sequences_used"], values["actor/updates"]) == (0, 0)


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (None, None)])
def test_a_step_without_signal_says_why(rewards: tuple[float | None, ...]) -> None:
    notes: list[str] = []
    batch, updates, _ = learn(cast(Any, job({"filters": ["zero_signal"]}, notes)), rollouts("stop", rewards))
    assert batch is None
    assert updates == []
    assert len(notes) == 1
    assert "step 7: no update" in notes[0]


def test_an_accuracy_that_no_reward_gave_is_not_logged_as_zero() -> None:
    sampled = rollouts("stop")
    for trajectory in sampled.trajectories:
        trajectory.accuracy = None
    assert "reward/accuracy" not in observe.reward_values(sampled)
    assert observe.reward_values(sampled)["reward/mean"] == 0.5
