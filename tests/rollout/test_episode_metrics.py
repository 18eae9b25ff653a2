"""Metrics of episodes: turns and branches, events by kind, and what environments measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from burnish.core.trajectory import TokenNode, Trajectory, TurnSpan
from burnish.rollout.episode_metrics import branch_metrics, episode_metrics, turn_metrics
from burnish.rollout.scoring import RolloutBatch
from burnish.rollout.validation import validation_metrics
from burnish.trainers.step_metrics import rollout_metrics


def episode(branches: int, reward: float | None = 1.0, **metadata: Any) -> Trajectory:
    """A prompt that every branch follows with an observation and a turn."""
    nodes = [TokenNode(-1, np.array([1]))]
    for _ in range(branches):
        nodes.append(TokenNode(0, np.array([2])))
        nodes.append(TokenNode(len(nodes) - 1, np.array([3, 4]), np.zeros(2, np.float32), np.zeros(2, np.int32)))
    turns = [TurnSpan(2 * k + 2) for k in range(branches)]
    return Trajectory("p", 0, 0, nodes, "stop", "", reward, metadata=metadata, turns=turns)


def test_branches_are_counted_where_any_context_was_rewritten() -> None:
    assert branch_metrics([episode(1), episode(1)]) == {}
    found = turn_metrics([episode(3), episode(1)])
    assert found == {
        "turns_mean": 2.0,
        "turns_max": 3.0,
        "out_of_turns": 0.0,
        "environment_errors": 0.0,
        "branches": 2.0,
        "forks": 0.5,
    }


def test_events_are_summed_by_kind_and_measured_numbers_are_averaged() -> None:
    raised, late = {"kind": "tool_raised", "message": "x"}, {"kind": "tool_timed_out", "message": "y"}
    episodes = [
        episode(1, events=[raised, late, raised], episode_metrics={"steps": 3, "tool_raised": 0.5}),
        episode(1, reward=None, events=[raised], episode_metrics={"steps": 4.0}),
        episode(1),
    ]
    assert episode_metrics(episodes) == {
        "tool_raised": 3.0,
        "tool_timed_out": 1.0,
        "steps": 3.5,
        "tool_raised_mean": 0.5,
    }
    assert episode_metrics([episode(2)]) == {}


def test_training_and_validation_have_them() -> None:
    several = replace(episode(2, events=[{"kind": "tool_raised"}], episode_metrics={"steps": 3}), sample=1)
    rollouts = RolloutBatch([], [episode(1), several], 0.0, 0.0)
    trained, held_out = rollout_metrics(rollouts), validation_metrics(rollouts)
    assert (trained["rollout/branches"], trained["rollout/forks"]) == (1.5, 1 / 3)
    assert (held_out["branches"], held_out["forks"], held_out["turns_mean"]) == (1.5, 1 / 3, 1.5)
    for found in (trained, held_out):
        assert (found["environment/tool_raised"], found["environment/steps"]) == (1.0, 3.0)
