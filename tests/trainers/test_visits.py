"""How a step's prompts were answered, as the journal is told."""

from __future__ import annotations

from typing import Any

from burnish.core.trajectory import Trajectory
from burnish.rollout.scoring import RolloutBatch
from burnish.run.run import Visit
from burnish.trainers.step_metrics import visits


def sample(prompt: str, visit: int, number: int, **score: Any) -> Trajectory:
    return Trajectory(prompt, visit, number, [], "stop", "", **score)


def test_every_prompt_is_told_of_with_what_could_be_scored_and_judged() -> None:
    trajectories = [
        sample("f/1", 0, 0, reward=1.5, accuracy=1.0),
        sample("f/0", 2, 0, reward=0.5),
        sample("f/1", 0, 1, reward=0.0, accuracy=0.0),
        sample("f/1", 1, 0, error="the scorer failed"),
    ]
    assert visits(RolloutBatch([], trajectories, 0.0, 0.0)) == [
        Visit("f/1", 0, 2, 1.5, 2, 1.0),
        Visit("f/0", 2, 1, 0.5, 0, 0),
        Visit("f/1", 1, 0, 0, 0, 0),
    ]
