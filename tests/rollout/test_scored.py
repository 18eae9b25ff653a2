"""What a score leaves in its trajectory."""

from __future__ import annotations

from burnish.core.trajectory import Trajectory
from burnish.rewards.types import Score
from burnish.rollout.scoring import apply_score


def test_details_of_a_score_go_with_the_sample() -> None:
    trajectory = Trajectory("p", 0, 1, [], "stop", "text")
    apply_score(
        trajectory, Score("p#0.1", 0.5, 0.0, {"code": 0.5}, True, None, {"code": "test 1: passed", "mine": "why"})
    )
    assert (trajectory.reward, trajectory.accuracy, trajectory.parts) == (0.5, 0.0, {"code": 0.5})
    assert trajectory.metadata == {"timed_out": True, "details": "code: test 1: passed\nmine: why"}


def test_a_score_without_details_leaves_none() -> None:
    trajectory = Trajectory("p", 0, 1, [], "stop", "text")
    apply_score(trajectory, Score("p#0.1", 1.0, 1.0))
    assert trajectory.metadata == {"timed_out": False}
