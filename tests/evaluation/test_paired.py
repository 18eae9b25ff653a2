"""Differences of paired questions: intervals and exact tests against closed forms, enumeration and simulation."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.evaluation.comparison import difference, sign_flip_test


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact binomial test of the questions that changed."""
    n, extreme = gained + lost, max(gained, lost)
    tail = sum(math.comb(n, i) for i in range(extreme, n + 1)) / 2**n
    return min(1.0, 2 * tail)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_with_one_sample_each_the_test_is_mcnemars(gained: int, lost: int, same: int) -> None:
    values = [1.0] * gained + [-1.0] * lost + [0.0] * same
    assert sign_flip_test(values) == pytest.approx(mcnemar(gained, lost), rel=1e-9)


def test_mcnemar_worked_by_hand() -> None:
    assert sign_flip_test([1.0] * 5) == pytest.approx(2 / 32)
    assert sign_flip_test([1.0] * 8 + [-1.0] * 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert sign_flip_test([0.0, 0.0]) == 1.0
    assert sign_flip_test([]) == 1.0


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9), st.sampled_from([1, 3, 4, 6, 8]))
@settings(deadline=None)
def test_the_test_counts_all_choices_of_signs(steps: list[int], samples: int) -> None:
    values = [step / samples for step in steps]
    sums = [
        abs(sum(s * v for s, v in zip(signs, steps, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(steps))
    ]
    expected = sum(total >= abs(sum(steps)) for total in sums) / len(sums)
    assert sign_flip_test(values) == pytest.approx(expected, rel=1e-9)


def test_samples_of_different_numbers_have_a_common_step() -> None:
    values = [1 / 3, -1 / 8, 0.25, 1 / 7, -0.5]
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in itertools.product((-1, 1), repeat=5)
    ]
    assert sign_flip_test(values) == pytest.approx(sum(s >= abs(sum(values)) - 1e-9 for s in sums) / 32)


def test_a_difference_of_nothing_that_changed_still_has_a_width() -> None:
    mean, low, high = difference([0.0] * 50)
    assert mean == 0
    assert low == pytest.approx(-high)
    assert 0.03 < high < 0.06


def test_the_adjusted_interval_worked_by_hand() -> None:
    # 100 questions, 12 gained, 5 lost: 13/102 and 6/102 after one more of each (Bonett and Price, 2012).
    p, q = 13 / 102, 6 / 102
    half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / 102)
    values = [1.0] * 12 + [-1.0] * 5 + [0.0] * 83
    assert difference(values) == pytest.approx((0.07, p - q - half, p - q + half), abs=1e-6)


def test_a_sampled_difference_worked_by_hand() -> None:
    # 0.5, 0, 0.25 and 0.25: mean 0.25, variance 0.125/3, Student's 3.1824 at three degrees.
    half = 3.1824 * math.sqrt(0.125 / 3 / 4)
    assert difference([0.5, 0.0, 0.25, 0.25]) == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    assert difference([0.25]) == (0.25, -1.0, 1.0)
    with pytest.raises(ValueError, match="no questions"):
        difference([])


@pytest.mark.parametrize(("samples", "num_questions"), [(1, 60), (1, 200), (8, 30)])
def test_the_paired_interval_covers_the_truth_about_95_percent_of_the_time(samples: int, num_questions: int) -> None:
    dice = random.Random(2)
    covered, repeats = 0, 500
    for _ in range(repeats):
        values = []
        for _ in range(num_questions):
            a = dice.betavariate(0.5, 1.0)
            b = min(1.0, a + 0.2 * (1 - a))  # the second model is right on a fifth of what the first fails: +2/15
            mean = [sum(dice.random() < p for _ in range(samples)) / samples for p in (a, b)]
            values.append(mean[1] - mean[0])
        _, low, high = difference(values)
        covered += low <= 2 / 15 <= high
    assert 0.92 < covered / repeats < 0.985


def test_two_equal_models_are_called_different_one_time_in_twenty_at_most() -> None:
    dice = random.Random(3)
    found, repeats = 0, 300
    for _ in range(repeats):
        chances = [dice.betavariate(0.5, 1.0) for _ in range(40)]
        values = [sum(dice.choice((-1, 1)) * (dice.random() < p) for _ in range(4)) / 4 for p in chances]
        found += sign_flip_test(values) < 0.05
    assert found / repeats < 0.085
