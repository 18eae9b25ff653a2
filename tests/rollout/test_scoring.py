"""Scores and trajectories: what a score writes, and the round trip through arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.trajectory import TokenSequence, Trajectory
from burnish.rewards.score_types import Score
from burnish.rollout.scoring import apply_score, from_arrays, restore_scores, scores_to_arrays, to_arrays

logps = st.floats(-50, 0, width=32)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def sequences(draw: st.DrawFn) -> TokenSequence:
    n = draw(st.integers(1, 6))

    def column(values: st.SearchStrategy[Any], dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype=dtype)

    return TokenSequence(
        tokens=column(st.integers(0, 2**40), np.int64),
        action_mask=column(st.booleans(), np.bool_),
        behaviour_logp=column(logps, np.float32),
        version=column(st.integers(-1, 1000), np.int32),
    )


trajectories = st.builds(
    Trajectory,
    prompt_id=st.text(max_size=5),
    visit=st.integers(0, 9),
    sample=st.integers(0, 9),
    sequences=st.lists(sequences(), min_size=1, max_size=3),
    finish=st.sampled_from(["stop", "length", "turns", "aborted"]),
    completion=st.text(max_size=8),
    reward=numbers,
    accuracy=numbers,
    parts=st.dictionaries(st.text(max_size=3), st.floats(-5, 5), max_size=2),
    error=st.none() | st.text(max_size=8),
    metadata=st.dictionaries(st.text(max_size=3), st.integers() | st.booleans(), max_size=2),
)


def same(a: Trajectory, b: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        if field.name != "sequences":
            assert getattr(a, field.name) == getattr(b, field.name)
    assert len(a.sequences) == len(b.sequences)
    for one, other in zip(a.sequences, b.sequences, strict=True):
        for name in ("tokens", "action_mask", "behaviour_logp", "version"):
            left, right = getattr(one, name), getattr(other, name)
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
    arrays = to_arrays([Trajectory("p", 0, 0, [_sequence()], "stop", "x")])
    (again,) = from_arrays(arrays)
    arrays["tokens"][:] = 0
    assert again.sequences[0].tokens.tolist() == [4, 5]


def _sequence() -> TokenSequence:
    return TokenSequence(
        np.array([4, 5]), np.array([False, True]), np.array([0, -1], np.float32), np.array([-1, 0], np.int32)
    )


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
