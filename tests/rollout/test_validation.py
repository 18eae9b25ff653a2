"""Validation metrics: means over scored samples, and no metric without data."""

from __future__ import annotations

import numpy as np

from burnish.core.trajectory import Trajectory, chain_nodes
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.rollout.scoring import RolloutBatch
from burnish.rollout.validation import validation_metrics


def measured(*scores: tuple[float | None, float | None]) -> RolloutBatch:
    """One prompt a (reward, accuracy), its `length` column 4 for the first and 5 for the others, two tokens written."""
    draws, trajectories = [], []
    for k, (reward, accuracy) in enumerate(scores):
        row = Row(f"rows/{k}", "q", "rows", "a", {"length": min(4 + k, 5)})
        draws.append(PromptSample(Prompt(row, "q", [1]), 0))
        nodes = chain_nodes(
            np.array([1, 2, 3]), np.array([False, True, True]), np.zeros(3, np.float32), np.zeros(3, np.int32)
        )
        trajectories.append(Trajectory(row.id, 0, 0, nodes, "stop", "", reward, accuracy))
    return RolloutBatch(draws, trajectories, 0.0, 0.0)


def test_a_failed_scorer_counts_in_failed_and_in_nothing_else() -> None:
    assert validation_metrics(measured((1.0, 1.0), (0.5, 0.0), (None, None)), "length") == {
        "failed": 1.0,
        "accuracy": 0.5,
        "reward_mean": 0.75,
        "length_mean": 2.0,
        "truncated": 0.0,
        "accuracy/length=4": 1.0,
        "accuracy/length=5": 0.0,
    }


def test_a_reward_that_says_neither_right_nor_wrong_gives_no_accuracy() -> None:
    values = validation_metrics(measured((0.2, None), (0.4, None)), "length")
    assert {k for k in values if k.startswith("accuracy")} == set()
    assert {k: v for k, v in values.items() if k.startswith("reward_mean/")} == {
        "reward_mean/length=4": 0.2,
        "reward_mean/length=5": 0.4,
    }
    assert validation_metrics(measured((0.2, None), (1.0, 1.0)))["accuracy"] == 1.0


def test_a_call_that_timed_out_is_wrong_only_where_others_are_right_or_wrong() -> None:
    graded, judged = measured((7.0, None), (0.0, 0.0)), measured((1.0, 1.0), (0.0, 0.0))
    for scored in (graded, judged):
        scored.trajectories[1].metadata["timed_out"] = True
    assert "accuracy" not in validation_metrics(graded)
    assert validation_metrics(judged)["accuracy"] == 0.5
