"""maj@k and best@k against every subset, and worked by hand."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.evaluation.statistics import FLOATS_UP_TO, best_at_k, maj_at_k, pass_at_k


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
    half = 2 * FLOATS_UP_TO
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


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=8), st.data())
@settings(max_examples=150, deadline=None)
def test_best_at_k_is_the_mean_over_all_subsets(samples: list[tuple[int, int]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))

    def chosen(subset: tuple[tuple[int, int], ...]) -> float:
        best = max(score for score, _ in subset)
        values = [value for score, value in subset if score == best]
        return sum(values) / len(values)

    subsets = list(itertools.combinations(samples, k))
    scores, values = [float(s) for s, _ in samples], [float(v) for _, v in samples]
    assert best_at_k(scores, values, k) == pytest.approx(sum(map(chosen, subsets)) / len(subsets), abs=1e-12)


def test_best_at_k_worked_by_hand() -> None:
    scores = [0.1, 0.5, 0.9]
    assert best_at_k(scores, scores, 2) == pytest.approx((0.5 + 0.9 + 0.9) / 3)  # the best of each pair
    assert best_at_k(scores, [1.0, 1.0, 0.0], 2) == pytest.approx(1 / 3)  # the scorer likes the wrong one
    assert best_at_k([0.0, 1.0, 1.0], [0.0, 1.0, 1.0], 2) == pass_at_k(3, 2, 2)
