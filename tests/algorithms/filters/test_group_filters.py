"""Group filters: which prompts are used at all (ALGORITHMS.md 11.1, 11.2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.filters.filter_functions import truncation
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import GROUP_FILTERS, difficulty_band, snr, zero_signal

NAN = float("nan")


def grouped(values: list[float], groups: list[int], column: str = "reward") -> Batch:
    s = len(groups)
    return Batch(torch.arange(s), torch.arange(s + 1)).with_sequence(
        group_ids=torch.tensor(groups), **{column: torch.tensor(values, dtype=torch.float64)}
    )


FOUR = [1.0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1]
FOUR_GROUPS = [9] * 4 + [4] * 4 + [6] * 4 + [1] * 4


def test_groups_whose_rewards_are_all_equal_are_dropped() -> None:
    assert zero_signal(grouped(FOUR, FOUR_GROUPS)).tolist() == [False] * 8 + [True] * 8


def test_the_metric_decides_what_must_differ() -> None:
    batch = grouped(FOUR, FOUR_GROUPS, "accuracy").with_sequence(reward=torch.arange(16, dtype=torch.float64))
    assert zero_signal(batch, metric="accuracy").tolist() == [False] * 8 + [True] * 8
    assert zero_signal(batch).all()


def test_a_group_of_one_is_kept() -> None:
    assert zero_signal(grouped([0.5, 1, 1], [3, 2, 2])).tolist() == [True, False, False]


def test_one_trajectory_of_two_sequences_is_a_group_of_one() -> None:
    batch = grouped([1.0, 1, 1, 1], [0, 0, 1, 1]).with_sequence(trajectory_ids=torch.tensor([5, 5, 6, 7]))
    assert zero_signal(batch).tolist() == [True, True, False, False]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12))
def test_kept_groups_have_a_deviation_or_one_member_wherever_their_samples_stand(
    pairs: list[tuple[int, float]],
) -> None:
    keep = zero_signal(grouped([r for _, r in pairs], [g for g, _ in pairs])).tolist()
    for i, (group, _) in enumerate(pairs):
        own = [r for g, r in pairs if g == group]
        assert keep[i] == (len(set(own)) > 1 or len(own) == 1)


def test_the_band_keeps_groups_that_are_neither_too_easy_nor_too_hard() -> None:
    accuracy = [1.0, 0, 0, 0] + [1.0] * 4 + [1.0, 1, 0, 0] + [0.0] * 4 + [1.0, 1, 1, 0]
    groups = [8] * 4 + [2] * 4 + [5] * 4 + [0] * 4 + [3] * 4
    keep = difficulty_band(grouped(accuracy, groups, "accuracy"))
    assert keep.tolist() == [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4


def test_the_edges_of_the_band_are_inside_it() -> None:
    batch = grouped([1.0, 0, 0, 0, 0, 1, 1, 1, 1, 0], [0] * 5 + [1] * 5, "accuracy")
    assert difficulty_band(batch, low=0.2, high=0.8).all()
    assert difficulty_band(batch, low=0.21, high=0.8).tolist() == [False] * 5 + [True] * 5
    assert difficulty_band(batch, low=0.2, high=0.79).tolist() == [True] * 5 + [False] * 5


def test_a_trajectory_of_many_sequences_counts_once_in_the_mean() -> None:
    batch = grouped([1.0] * 9 + [0.0], [0] * 10, "accuracy")
    assert not difficulty_band(batch).any()
    assert difficulty_band(batch.with_sequence(trajectory_ids=torch.tensor([4] * 9 + [2]))).all()


def test_a_sample_nobody_judged_is_an_error_that_says_what_to_add() -> None:
    batch = grouped([1.0, NAN, 0.0], [0, 0, 0], "accuracy")
    with pytest.raises(UserError, match=r"difficulty_band needs .* 1 of 3 samples have no accuracy: add a reward part"):
        difficulty_band(batch)
    with pytest.raises(UserError, match="zero_signal needs"):
        zero_signal(batch, metric="accuracy")


def test_one_truncated_sample_drops_its_group() -> None:
    batch = grouped([0.0] * 5, [7, 7, 3, 3, 1]).with_sequence(truncated=torch.tensor([False, True, False, False, True]))
    assert truncation(batch).tolist() == [False, False, True, True, False]


@given(st.data())
def test_group_filters_follow_their_samples_when_rows_are_permuted(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 10))
    column = st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size)
    batch = grouped(data.draw(column), data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    batch = batch.with_sequence(
        accuracy=torch.tensor(data.draw(column), dtype=torch.float64),
        truncated=torch.tensor(data.draw(column)) > 0,
    )
    order = torch.tensor(data.draw(st.permutations(range(size))))
    for function in GROUP_FILTERS.values():
        assert torch.equal(function(batch)[order], function(batch.select(order)))


# --- snr, on the worked example of ALGORITHMS-2026.md N6.1: spreads .57735, 0, .5, .08165 -----------------------------------

SPREAD = [1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0.4, 0.6, 0.5, 0.5]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 2]),
        ({"share": 0.5}, [0]),
        ({"share": 1.0}, [0, 1, 2, 3]),
        ({"share": 1.0, "include_zero": False}, [0, 2, 3]),
        ({"share": 0.99, "slack": 0.0}, [0, 2, 3]),
        ({"slack": 0.0}, [0, 2]),
        ({"mode": "softmax", "share": 0.322}, [0]),
        ({"mode": "softmax", "share": 0.62}, [0, 2]),
        ({"mode": "softmax", "share": 0.63}, [0, 2, 3]),
        ({"mode": "softmax", "share": 0.82}, [0, 1, 2, 3]),
        ({"mode": "softmax", "share": 1.0, "include_zero": False}, [0, 2, 3]),
        ({"mode": "top", "share": 0.5}, [0, 2]),
        ({"mode": "top", "share": 0.51}, [0, 2, 3]),
        ({"mode": "top", "share": 1.0}, [0, 1, 2, 3]),
        ({"mode": "top", "share": 1.0, "include_zero": False}, [0, 2, 3]),
        ({"mode": "relative", "share": 0.9}, [0]),
        ({"mode": "relative", "share": 0.8}, [0, 2]),
    ],
)
def test_snr_keeps_the_groups_of_largest_spread(options: dict[str, Any], kept: list[int]) -> None:
    found = snr(grouped(SPREAD, [k // 4 for k in range(16)]), **options)
    assert found.view(4, 4).all(1).nonzero().squeeze(1).tolist() == kept
    assert torch.equal(found.view(4, 4).any(1), found.view(4, 4).all(1))


def test_snr_keeps_nothing_where_rewards_are_equal_or_alone() -> None:
    batch = grouped([0.1, 0.1, 5.0], [0, 0, 1])
    assert not snr(batch).any()
    assert all(not snr(batch, mode=mode, include_zero=False).any() for mode in ("softmax", "top", "relative"))


def test_snr_counts_a_trajectory_of_two_sequences_once() -> None:
    """The spreads are .7071 and .4525. With the first reward counted twice they would be .5774 and .4525."""
    batch = grouped([1.0, 1.0, 0.0, 1.0, 0.36], [0, 0, 0, 1, 1])
    batch = batch.with_sequence(trajectory_ids=torch.tensor([0, 0, 1, 2, 3]))
    assert snr(batch, mode="relative", share=0.7).tolist() == [True] * 3 + [False] * 2
