"""Choosing prompts and samples: curricula, learning impact, long2short pairs (ALGORITHMS.md 12.1 to 12.8, 13)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.curriculum.prompt_selection import (
    difficulty_buckets,
    hard_prompts,
    limr_scores,
    linear_anneal,
    long2short_pairs,
    prioritised_probabilities,
    shortest_correct,
)

NAN = float("nan")
CURVES = [[0.2, 0.5, 0.7, 0.9], [0.0, 0.0, 0.1, 0.1], [1.0, 1.0, 1.0, 1.0]]


def rows(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- prompts -----------------------------------------------------------------------------------------------------------


def test_the_worked_learning_impact() -> None:
    torch.testing.assert_close(limr_scores(rows(CURVES)), rows([[0.881463, -0.113493, 0.0]])[0], atol=1e-5, rtol=0)
    assert (limr_scores(rows(CURVES)) >= 0.6).tolist() == [True, False, False]


def test_a_missing_epoch_takes_the_next_ones_value() -> None:
    gaps = [[NAN, NAN, 0.7, 0.9], *CURVES[1:]]
    filled = [[0.7, 0.7, 0.7, 0.9], *CURVES[1:]]
    assert torch.equal(limr_scores(rows(gaps)), limr_scores(rows(filled)))


def test_a_prompt_that_is_still_missing_leaves_the_average_too() -> None:
    scores = limr_scores(rows([*CURVES, [1.0, 0.0, 0.0, NAN]]))
    assert torch.equal(scores[:3], limr_scores(rows(CURVES)))
    assert scores[3] == -torch.inf


def test_nothing_is_kept_when_everything_was_solved_throughout_or_nothing_is_whole() -> None:
    assert limr_scores(torch.ones(3, 4)).tolist() == [-torch.inf] * 3
    assert limr_scores(torch.full((3, 4), NAN)).tolist() == [-torch.inf] * 3


# --- samples -----------------------------------------------------------------------------------------------------------


def test_the_shortest_right_sample_of_each_group() -> None:
    lengths = torch.tensor([50, 30, 40, 20, 7, 9, 9, 8])
    correct = torch.tensor([1, 1, 1, 0, 0, 1, 1, 0])
    groups = torch.tensor([6, 6, 6, 6, 2, 4, 4, 2])
    assert shortest_correct(lengths, correct, groups).tolist() == [-1, 5, 1]  # groups 2, 4, 6


def test_the_worked_pairs_of_long2short() -> None:
    lengths, correct = torch.tensor([100, 140, 150, 300, 60]), torch.tensor([1, 1, 1, 0, 0])
    chosen, rejected = long2short_pairs(lengths, correct, torch.zeros(5, dtype=torch.int64))
    assert (chosen.tolist(), rejected.tolist()) == ([0, 0], [2, 3])
    assert long2short_pairs(lengths, correct, torch.zeros(5, dtype=torch.int64), ratio=1.4)[1].tolist() == [1, 2, 3]


def test_the_chosen_sample_is_never_rejected_too() -> None:
    lengths, correct, groups = torch.tensor([0, 4]), torch.tensor([1, 1]), torch.tensor([2, 2])
    assert [t.tolist() for t in long2short_pairs(lengths, correct, groups)] == [[0], [1]]


def test_a_group_without_a_right_sample_gives_no_pair() -> None:
    chosen, rejected = long2short_pairs(torch.tensor([5, 9]), torch.tensor([0, 0]), torch.tensor([3, 3]))
    assert chosen.numel() == rejected.numel() == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), min_size=1, max_size=20))
def test_pairs_are_those_a_plain_loop_finds(samples: list[tuple[int, int, bool]]) -> None:
    expected = []
    for g in sorted({group for group, _, _ in samples}):
        own = [(i, length, right) for i, (group, length, right) in enumerate(samples) if group == g]
        right = [(length, i) for i, length, ok in own if ok]
        if right:
            shortest, best = min(right)
            expected += [
                (best, i)
                for i, length, ok in own
                if i != best and (length >= 1.5 * shortest if ok else length > shortest)
            ]
    groups, lengths, correct = (torch.tensor(column) for column in zip(*samples, strict=True))
    chosen, rejected = long2short_pairs(lengths, correct, groups)
    assert sorted(zip(chosen.tolist(), rejected.tolist(), strict=True)) == sorted(expected)


# --- weights and stages ------------------------------------------------------------------------------------------------


# --- Curricula


def test_prompts_are_drawn_by_how_often_they_fail() -> None:
    found = prioritised_probabilities(torch.tensor([0.9, 0.5, 0.1, 0.0], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([0.04, 0.2, 0.36, 0.4], dtype=torch.float64))


def test_solved_prompts_are_drawn_evenly_when_nothing_else_is_left() -> None:
    assert prioritised_probabilities(torch.ones(4)).tolist() == [0.25] * 4
    assert prioritised_probabilities(torch.tensor([1.0, 0.5])).tolist() == [0.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_chances_sum_to_one_and_fall_with_success(success: list[float]) -> None:
    chances = prioritised_probabilities(torch.tensor(success, dtype=torch.float64))
    assert float(chances.sum()) == pytest.approx(1)
    order = torch.tensor(success).argsort()
    assert bool((chances[order].diff() <= 1e-6).all())


def test_easy_buckets_come_first_and_keep_their_own_order() -> None:
    difficulty = torch.tensor([0.9, 0.1, 0.5, 0.2, 0.7, 0.3])
    assert difficulty_buckets(difficulty, 3).tolist() == [2, 0, 1, 0, 2, 1]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 6))
def test_buckets_are_of_nearly_equal_size_and_ordered(difficulty: list[float], num: int) -> None:
    values = torch.tensor(difficulty)
    buckets = difficulty_buckets(values, num)
    sizes = torch.bincount(buckets, minlength=num)
    assert int(sizes.max() - sizes.min()) <= 1
    by_bucket = [values[buckets == b] for b in range(num) if bool((buckets == b).any())]
    assert all(a.max() <= b.min() for a, b in zip(by_bucket, by_bucket[1:], strict=False))


def test_hard_prompts_have_fewer_than_four_of_64_right() -> None:
    correct, tried = torch.tensor([3, 4, 0, 0, 1]), torch.tensor([64, 64, 64, 0, 16])
    assert hard_prompts(correct, tried, below=4 / 64).tolist() == [True, False, True, False, False]


def test_the_annealed_rate_is_linear_then_constant() -> None:
    found = [linear_anneal(s, 100, 1e-6, 3e-7) for s in (0, 50, 100, 150)]
    assert found == pytest.approx([1e-6, 6.5e-7, 3e-7, 3e-7], abs=1e-12)
