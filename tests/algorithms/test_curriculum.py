"""Formulas of curricula and schedules (ALGORITHMS.md 12.4 to 12.9)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.curriculum.prompt_selection import (
    difficulty_buckets,
    easy_to_hard,
    emitted,
    hard_prompts,
    has_plateaued,
    linear_anneal,
    partial_mask,
    prioritised_probabilities,
    weight_after_warmup,
)


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
    assert easy_to_hard(difficulty, 3).tolist() == [1, 3, 2, 5, 0, 4]
    assert easy_to_hard(difficulty, 1).tolist() == list(range(6))
    assert easy_to_hard(torch.zeros(4), 2).tolist() == [0, 1, 2, 3]


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
    assert hard_prompts(correct, tried).tolist() == [True, False, True, False, False]


def test_a_plateau_is_two_windows_without_the_gain() -> None:
    assert not has_plateaued([0.0, 0.0, 0.0], window=2, gain=0.1)
    assert has_plateaued([0.0, 0.0, 0.0, 0.0], window=2, gain=0.1)
    assert not has_plateaued([0.0, 0.0, 0.5, 0.5], window=2, gain=0.1)
    assert not has_plateaued([0.0, 0.0, 0.25, 0.25], window=2, gain=0.25)
    assert has_plateaued([0.0, 9.0, 9.0, 9.0, 9.0], window=2, gain=0.1)


def test_the_annealed_rate_is_linear_then_constant() -> None:
    found = [linear_anneal(s, 100, 1e-6, 3e-7) for s in (0, 50, 100, 150)]
    assert found == pytest.approx([1e-6, 6.5e-7, 3e-7, 3e-7], abs=1e-12)


def test_a_weight_is_off_for_the_first_steps_then_constant() -> None:
    assert [weight_after_warmup(s, 0.5, 2) for s in (1, 2, 3, 400)] == [0, 0, 0.5, 0.5]
    assert weight_after_warmup(1, 0.5, 0) == 0.5


def test_partial_rollouts_train_each_token_once_in_the_iteration_that_wrote_it() -> None:
    written = torch.arange(10)
    masks = [partial_mask(written, 4, i).nonzero().squeeze(1).tolist() for i in range(3)]
    assert masks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert emitted(10, 4) == [4, 4, 2]
    assert emitted(4, 4) == [4]
    assert emitted(1, 4) == [1]
