"""pass@k and intervals against enumeration, closed forms and simulation."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.evaluation.statistics import (
    MAX_EXACT_BINOMIAL,
    Z95,
    best_at_k,
    clustered_interval,
    maj_at_k,
    mean_at_k,
    mean_pass_at_k,
    pass_at_k,
    powers_up_to,
    student_t95,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [
        (10, 3, 1, 0.3),
        (10, 3, 2, 0.533333),
        (10, 3, 5, 0.916667),
        (10, 0, 5, 0),
        (10, 8, 3, 1),
        (200, 13, 100, 0.999919),
    ],
)
def test_pass_at_k_of_known_cases(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=5e-7)


@given(st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    right = sum(any(i < correct for i in subset) for subset in subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(right / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_what_cannot_be(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, correct, k)


def passed(groups: list[list[float]], k: int) -> float:
    estimate = mean_pass_at_k(groups, k)
    assert estimate is not None
    return estimate.mean


def test_pass_at_k_leaves_out_prompts_with_too_few_samples() -> None:
    groups = [[1.0, 0.0], [0.0, 0.0], [1.0]]
    assert passed(groups, 1) == pytest.approx((0.5 + 0 + 1) / 3)
    assert passed(groups, 2) == pytest.approx((1 + 0) / 2)
    assert mean_pass_at_k(groups, 4) is None


def test_only_a_full_accuracy_is_right_for_pass_at_k() -> None:
    assert passed([[0.9, 0.5]], 2) == 0.0


def test_pass_at_1_is_the_mean_and_has_its_interval() -> None:
    groups = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert mean_pass_at_k(groups, 1) == pytest.approx(mean_at_k(groups))


def test_the_interval_of_pass_at_k_worked_by_hand() -> None:
    # pass@2 of 1 in 3 is 2/3, of 3 in 3 it is 1: mean 5/6 and variance 1/36 over ten questions, so (5/36) * 9 * 36 = 45
    # trials, times (1.95996 / 2.2622)^2 = 33.8; but three samples hold one and a half pairs, which makes 15 of ten questions.
    groups = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]] * 5
    assert mean_pass_at_k(groups, 2) == pytest.approx(wilson_interval(5 / 6, 15))


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [1, 2]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8])])
def test_powers_of_two_up_to_n(n: int, expected: list[int]) -> None:
    assert powers_up_to(n) == expected


def test_wilson_of_a_published_case() -> None:
    # Newcombe (1998), table I: 81 of 263 is 0.2553 to 0.3662, 0 of 20 is 0 to 0.1611, 1 of 29 is 0.0061 to 0.1718.
    for right, n, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)):
        assert wilson_interval(right / n, n) == pytest.approx((right / n, low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_ends_of_wilsons_interval_are_z_deviations_from_the_mean(case: tuple[int, int]) -> None:
    right, n = case
    mean, low, high = wilson_interval(right / n, n)
    assert 0 <= low <= mean <= high <= 1
    for end in (low, high):
        assert (mean - end) ** 2 == pytest.approx(Z95**2 * end * (1 - end) / n, abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60))
def test_one_sample_a_prompt_gives_wilsons_interval(values: list[float]) -> None:
    assert mean_at_k([[v] for v in values]) == pytest.approx(
        wilson_interval(sum(values) / len(values), len(values)), abs=1e-12
    )


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40), st.integers(2, 8))
def test_copies_of_a_sample_make_nobody_surer(values: list[float], copies: int) -> None:
    assert mean_at_k([[v] * copies for v in values]) == pytest.approx(mean_at_k([[v] for v in values]), abs=1e-12)


def test_samples_never_count_for_more_than_they_are() -> None:
    groups = [[0.0, 1.0]] * 10  # no variance between prompts at all
    assert mean_at_k(groups) == wilson_interval(0.5, 20)


def test_the_mean_is_over_prompts_not_over_samples() -> None:
    assert mean_at_k([[1.0, 1.0, 1.0], [0.0]]).mean == 0.5


def test_accuracies_outside_0_to_1_get_a_normal_interval() -> None:
    half = Z95 * (5 / 4) ** 0.5  # four prompts of variance 5
    assert mean_at_k([[0.0], [2.0], [4.0], [6.0]]) == pytest.approx((3.0, 3.0 - half, 3.0 + half))


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        mean_at_k([[], []])


def test_an_empty_group_says_nothing() -> None:
    assert mean_at_k([[1.0], [], [0.0]]) == wilson_interval(0.5, 2)


def test_the_effective_number_of_trials_worked_by_hand() -> None:
    # Means 1/2 and 1, five of each: mean 3/4, variance 1/16, so (3/16) * 9 * 16 = 27, times (1.95996 / 2.2622)^2 = 20.27
    # trials of the 40 that were made.
    groups = [[1.0, 1.0, 0.0, 0.0], [1.0] * 4] * 5
    assert mean_at_k(groups) == pytest.approx(wilson_interval(0.75, 20.27), abs=1e-4)
    assert clustered_interval([0.5, 1.0] * 5, trials=15) == pytest.approx(wilson_interval(0.75, 15))
    assert clustered_interval([0.5, 1.0], trials=8) == pytest.approx(
        wilson_interval(0.75, 2)
    )  # two questions say little of how they vary
    assert clustered_interval([0.25], trials=4) == pytest.approx(wilson_interval(0.25, 1))


@pytest.mark.parametrize(
    ("freedom", "point"), [(1, 12.7062), (4, 2.7764), (5, 2.5706), (10, 2.2281), (29, 2.0452), (200, 1.9719)]
)
def test_students_points_of_the_tables(freedom: int, point: float) -> None:
    assert student_t95(freedom) == pytest.approx(point, abs=5e-4)


@pytest.mark.parametrize(
    ("num_questions", "samples", "k", "hard"),
    [(60, 8, 1, 1.0), (30, 16, 1, 2.0), (30, 16, 4, 2.0), (100, 1, 1, 3.0)],
    ids=["many", "like AIME", "pass@4 of 16", "greedy"],
)
def test_the_clustered_interval_covers_the_truth_about_95_percent_of_the_time(
    num_questions: int, samples: int, k: int, hard: float
) -> None:
    dice = random.Random(0)
    # Questions differ a lot: the chance p of a right sample is of beta(1/2, hard). E[1 - (1-p)^k] by its moments.
    missed = math.prod((hard + i) / (0.5 + hard + i) for i in range(k))
    covered, repeats = 0, 400
    for _ in range(repeats):
        chances = [dice.betavariate(0.5, hard) for _ in range(num_questions)]
        estimate = mean_pass_at_k([[float(dice.random() < p) for _ in range(samples)] for p in chances], k)
        assert estimate is not None
        covered += estimate.low <= 1 - missed <= estimate.high
    assert 0.92 < covered / repeats < 0.985


# maj@k against every subset, best@k against every sequence of draws, and both against values computed by hand.


def vote(subset: tuple[str | None, ...], right: str) -> float:
    counts = Counter(v for v in subset if v is not None)
    most = max(counts.values(), default=0)
    winners = [answer for answer, count in counts.items() if count == most]
    return winners.count(right) / len(winners) if winners else 0.0


@given(st.lists(st.sampled_from(["r", "a", "b", "c", None]), min_size=1, max_size=9), st.data())
@settings(max_examples=150, deadline=None)
def test_maj_at_k_is_the_mean_over_all_subsets(votes: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(votes)))
    outcomes = [vote(subset, "r") for subset in itertools.combinations(votes, k)]
    assert maj_at_k(votes, "r", k) == pytest.approx(sum(outcomes) / len(outcomes), abs=1e-12)


def test_maj_at_k_worked_by_hand() -> None:
    votes = ["r", "r", "a", "b"]  # pairs: rr wins, four times r with another is a tie, ab loses
    assert maj_at_k(votes, "r", 2) == pytest.approx((1 + 4 * 0.5) / 6)
    assert maj_at_k(votes, "r", 1) == 0.5
    assert maj_at_k(votes, "r", 4) == 1.0
    assert maj_at_k(["r", "a", "a"], "r", 3) == 0.0
    assert maj_at_k(["r", "a"], "r", 2) == 0.5


def test_a_completion_without_an_answer_has_no_vote() -> None:
    assert maj_at_k(["r", None, None], "r", 3) == 1.0
    assert maj_at_k(["r", None, None], "r", 1) == pytest.approx(1 / 3)
    assert maj_at_k([None, None], "r", 2) == 0.0


@given(st.integers(0, 6), st.integers(0, 6), st.data())
def test_without_wrong_answers_a_vote_is_pass_at_k(right: int, silent: int, data: st.DataObject) -> None:
    if right + silent == 0:
        return
    k = data.draw(st.integers(1, right + silent))
    assert maj_at_k(["r"] * right + [None] * silent, "r", k) == pytest.approx(pass_at_k(right + silent, right, k))


def test_many_samples_agree_with_drawn_subsets() -> None:
    dice = random.Random(1)
    votes = ["r"] * 20 + ["a"] * 17 + ["b"] * 12 + list("cdefg") + [None] * 10
    drawn = [vote(tuple(dice.sample(votes, 16)), "r") for _ in range(4000)]
    assert maj_at_k(votes, "r", 16) == pytest.approx(sum(drawn) / len(drawn), abs=0.025)


def test_more_samples_than_floats_can_count() -> None:
    half = 2 * MAX_EXACT_BINOMIAL
    votes = ["r"] * half + ["a"] * half
    assert maj_at_k(votes, "r", 32) == pytest.approx(0.5)
    assert maj_at_k(votes[: half + 1], "r", half + 1) == pytest.approx(1.0)
    silent: list[str | None] = ["r"] * half + [None] * half
    assert maj_at_k(silent, "r", 3) == pytest.approx(pass_at_k(2 * half, half, 3))


@pytest.mark.parametrize("k", [0, 3])
def test_a_choice_among_more_than_there_are_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k <= n"):
        maj_at_k(["r", "a"], "r", k)
    with pytest.raises(ValueError, match="needs 1 <= k <= n"):
        best_at_k([0.0, 1.0], [0.0, 1.0], k)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_best_at_k_is_the_mean_over_all_draws_with_replacement(
    samples: list[tuple[int, int]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(samples)))
    level = {s: [v for score, v in samples if score == s] for s, _ in samples}
    draws = list(itertools.product(samples, repeat=k))
    expected = sum(sum(level[best]) / len(level[best]) for best in (max(s for s, _ in draw) for draw in draws))
    scores, values = [float(s) for s, _ in samples], [float(v) for _, v in samples]
    assert best_at_k(scores, values, k) == pytest.approx(expected / len(draws), abs=1e-12)


def test_best_at_k_worked_by_hand() -> None:
    scores = [0.1, 0.5, 0.9]
    assert best_at_k(scores, scores, 2) == pytest.approx(
        (0.1 + 3 * 0.5 + 5 * 0.9) / 9
    )  # the best of each of 9 pairs of draws
    assert best_at_k(scores, [1.0, 1.0, 0.0], 2) == pytest.approx(4 / 9)  # the scorer likes the wrong one
    oracle = [0.2, 0.9, 0.3, 0.95, 0.4]
    assert best_at_k(oracle, oracle, 3) == pytest.approx(0.8092, abs=1e-5)
