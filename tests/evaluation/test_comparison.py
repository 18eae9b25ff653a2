"""Comparisons of known completions, and what cannot be compared."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.evaluation.comparison import (
    CompletionsPair,
    compare,
    comparison_table,
    find_pairs,
    mean_difference,
    sign_flip_test,
)
from burnish.evaluation.completions import write_completions
from tests.evaluation.completion_rows import row


def greedy(*accuracies: float | None) -> list[dict[str, Any]]:
    return [row(f"q{i}", 0, accuracy, completion=f"c{i}") for i, accuracy in enumerate(accuracies)]


def test_one_sample_each_worked_by_hand() -> None:
    a, b = greedy(1, 1, 0, 0, 0, 0), greedy(1, 0, 1, 1, 1, 0)
    found = compare(a, b)
    assert (found.both, found.only_a, found.only_b, found.neither) == (1, 1, 3, 1)
    assert (found.a.mean, found.b.mean) == pytest.approx((2 / 6, 4 / 6))
    assert found.difference.mean == pytest.approx(2 / 6)
    assert found.p_value == pytest.approx(2 * (4 + 1) / 16)  # three or four of four heads, or tails
    assert [(r["id"], r["difference"]) for r in found.changed] == [("q1", -1), ("q2", 1), ("q3", 1), ("q4", 1)]
    assert not found.is_sampled
    mirrored = compare(b, a)
    assert mirrored.difference == pytest.approx([-found.difference.mean, -found.difference.high, -found.difference.low])
    assert mirrored.p_value == found.p_value


def test_samples_are_averaged_and_an_example_of_each_side_is_kept() -> None:
    a = [row("q", i, float(i == 0), completion=f"a{i}") for i in range(4)]
    b = [row("q", i, float(i != 0), completion=f"b{i}") for i in range(4)]
    same = [row("p", i, 1.0) for i in range(4)]
    found = compare([*a, *same], [*b, *same])
    assert (found.both, found.only_a, found.only_b, found.neither) == (1, 0, 1, 0)
    assert found.difference.mean == 0.25
    assert found.p_value == 1.0  # one question that changed can change either way
    (change,) = found.changed
    assert (change["a"], change["b"], change["a_completion"], change["b_completion"]) == (0.25, 0.75, "a1", "b1")
    assert found.is_sampled


def test_questions_of_one_side_and_failed_ones_are_left_out_and_counted() -> None:
    found = compare(greedy(1, 0, None), greedy(1, 1, 1, 1))
    assert (found.num_questions, found.num_left_out) == (2, 2)
    text = comparison_table(found, CompletionsPair("d", Path("a"), Path("b")))
    assert "d            2 questions (2 are only in one, or not scored)" in text


def test_other_questions_are_refused() -> None:
    with pytest.raises(UserError, match="question q0 has the answer '7' in A and '8' in B"):
        compare(greedy(1), [row("q0", 0, 1.0, answer="8")])
    with pytest.raises(UserError, match="no question in common"):
        compare(greedy(1), [row("other", 0, 1.0)])


def test_results_are_found_in_folders_and_files(tmp_path: Path) -> None:
    for folder, names in (("a", ("x", "y")), ("b", ("y", "z"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "results.json").write_text("{}")
        for name in names:
            write_completions(tmp_path / folder / f"{name}.jsonl", greedy(1))
            result = {"settings": {}, "completions": f"{name}.jsonl"}
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(result))
    a, b = tmp_path / "a", tmp_path / "b"
    assert find_pairs(a, b) == [("y", a / "y.jsonl", b / "y.jsonl")]
    assert find_pairs(a / "x.jsonl", b / "z.json") == [("z", a / "x.jsonl", b / "z.jsonl")]
    assert find_pairs(a / "y.jsonl", b) == [("y", a / "y.jsonl", b / "y.jsonl")]
    with pytest.raises(UserError, match="no data set in common"):
        find_pairs(a / "x.jsonl", b)
    with pytest.raises(UserError, match="holds no finished evaluation"):
        find_pairs(a, tmp_path)
    with pytest.raises(UserError, match="neither a folder"):
        find_pairs(a, tmp_path / "missing.jsonl")


# Differences of paired questions: intervals and exact tests against closed forms, enumeration and simulation.


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
    mean, low, high = mean_difference([0.0] * 50)
    assert mean == 0
    assert low == pytest.approx(-high)
    assert 0.03 < high < 0.06


def test_the_adjusted_interval_worked_by_hand() -> None:
    # 100 questions, 12 gained, 5 lost: 13/102 and 6/102 after one more of each (Bonett and Price, 2012).
    p, q = 13 / 102, 6 / 102
    half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / 102)
    values = [1.0] * 12 + [-1.0] * 5 + [0.0] * 83
    assert mean_difference(values) == pytest.approx((0.07, p - q - half, p - q + half), abs=1e-6)


def test_a_sampled_difference_worked_by_hand() -> None:
    # 0.5, 0, 0.25 and 0.25: mean 0.25, variance 0.125/3, Student's 3.1824 at three degrees.
    half = 3.1824 * math.sqrt(0.125 / 3 / 4)
    assert mean_difference([0.5, 0.0, 0.25, 0.25]) == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    assert mean_difference([0.25]) == (0.25, -1.0, 1.0)
    with pytest.raises(ValueError, match="no questions"):
        mean_difference([])


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
        _, low, high = mean_difference(values)
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
