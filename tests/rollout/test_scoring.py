"""Scores and trajectories: what a score writes, and the round trip through arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.core.trajectory import TokenNode, Trajectory, TurnSpan
from burnish.rewards.score_types import Score
from burnish.rollout.scoring import apply_score, from_arrays, restore_scores, scores_to_arrays, to_arrays
from tests.core import token_forests

numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)
trajectories = st.builds(
    Trajectory,
    prompt_id=st.text(max_size=5),
    visit=st.integers(0, 9),
    sample=st.integers(0, 9),
    nodes=token_forests.nodes() | st.just([]),
    finish=st.sampled_from(["stop", "length", "turns", "aborted"]),
    completion=st.text(max_size=8),
    reward=numbers,
    accuracy=numbers,
    parts=st.dictionaries(st.text(max_size=3), st.floats(-5, 5), max_size=2),
    error=st.none() | st.text(max_size=8),
    metadata=st.dictionaries(st.text(max_size=3), st.integers() | st.booleans(), max_size=2),
    turns=st.lists(
        st.builds(TurnSpan, st.integers(0, 7), st.none() | st.text(max_size=3), st.floats(-5, 5)), max_size=3
    ),
)


def same(a: Trajectory, b: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        if field.name != "nodes":
            assert getattr(a, field.name) == getattr(b, field.name)
    marks = [[(node.parent, node.is_trained) for node in t.nodes] for t in (a, b)]
    assert marks[0] == marks[1]
    for one, other in zip(a.nodes, b.nodes, strict=True):
        for name in ("tokens", "logp", "version", "observed"):
            left, right = getattr(one, name), getattr(other, name)
            assert (left is None) == (right is None)
            if left is not None:
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)


@settings(max_examples=20, deadline=None)
@given(st.lists(trajectories, min_size=1, max_size=4))
def test_trajectories_come_back_from_arrays_as_they_were(group: list[Trajectory]) -> None:
    again = from_arrays(to_arrays(group))
    assert len(again) == len(group)
    for a, b in zip(group, again, strict=True):
        same(a, b)


@settings(max_examples=20, deadline=None)
@given(st.lists(trajectories, min_size=1, max_size=4))
def test_scores_come_back_into_their_trajectories(group: list[Trajectory]) -> None:
    blank = [dataclasses.replace(t, reward=None, accuracy=None, parts={}, error=None, metadata={}) for t in group]
    restore_scores(blank, scores_to_arrays(group))
    for a, b in zip(group, blank, strict=True):
        same(a, b)


def test_what_comes_back_owns_its_memory() -> None:
    arrays = to_arrays([Trajectory("p", 0, 0, [TokenNode(-1, np.array([4, 5]))], "stop", "x")])
    (again,) = from_arrays(arrays)
    arrays["tokens"][:] = 0
    assert again.nodes[0].tokens.tolist() == [4, 5]


def test_nodes_of_a_file_without_training_marks_are_trained() -> None:
    nodes = [TokenNode(-1, np.array([4])), TokenNode(0, np.array([5]), np.zeros(1, np.float32), is_trained=False)]
    arrays = to_arrays([Trajectory("p", 0, 0, nodes, "stop", "x")])
    assert [node.is_trained for node in from_arrays(arrays)[0].nodes] == [True, False]
    del arrays["trained"]
    assert [node.is_trained for node in from_arrays(arrays)[0].nodes] == [True, True]


def test_a_token_that_branches_share_is_stored_once() -> None:
    nodes = [TokenNode(-1, np.arange(50)), TokenNode(0, np.arange(3)), TokenNode(0, np.arange(4))]
    assert len(to_arrays([Trajectory("p", 0, 0, nodes, "stop", "")])["tokens"]) == 57


def test_rollouts_of_an_older_version_are_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"saved by an older version of burnish.*start a new run"):
        from_arrays({"tokens": np.arange(3), "sequences": np.ones(1)})


# --- Scores -------------------------------------------------------------------------------------------------------------


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
