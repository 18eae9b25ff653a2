"""What voting strategies would answer with k of n samples, against all choices of k and against the strategies themselves."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.evaluation.pool_estimates import (
    PooledQuestion,
    best_of_k,
    check_weights,
    is_pooled,
    majority_at_k,
    pooled_accuracy,
    weighted_vote_at_k,
)
from burnish.evaluation.statistics import maj_at_k, pass_at_k
from burnish.evaluation.strategies.registry import strategy_record
from burnish.evaluation.strategies.spec import STRATEGY_RECORDS
from burnish.evaluation.strategies.votes import elected
from tests.evaluation.strategies.toy import solve

ANSWERS = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=6)


def over_all_choices(n: int, k: int, accuracy: object) -> float:
    """Return the mean over every ordered choice of k of n samples."""
    found = [accuracy(list(order)) for order in itertools.permutations(range(n), k)]  # type: ignore[operator]
    return math.fsum(found) / len(found)


@settings(max_examples=60, deadline=None)
@given(ANSWERS, st.data())
def test_majority_is_the_mean_over_all_choices_in_all_orders(answers: list[str | None], data: st.DataObject) -> None:
    n = len(answers)
    right = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))

    def accuracy(order: list[int]) -> float:
        return right[order[elected([answers[i] for i in order])[0]]]

    assert majority_at_k(answers, right, k) == pytest.approx(over_all_choices(n, k, accuracy))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.1, 0.5, 0.9, None]), min_size=1, max_size=6), st.data())
def test_best_of_n_is_the_mean_over_all_choices_that_have_a_score(
    scores: list[float | None], data: st.DataObject
) -> None:
    n = len(scores)
    right = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    values = []
    for order in itertools.permutations(range(n), k):
        scored = [i for i in order if scores[i] is not None]
        if scored:
            values.append(right[max(scored, key=lambda i: (scores[i], -order.index(i)))])
    found = best_of_k(scores, right, k)
    assert found == (None if not values else pytest.approx(math.fsum(values) / len(values)))


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_more_budget_never_lowers_best_of_n_with_a_perfect_verifier(right: list[float]) -> None:
    found = [best_of_k(right, right, k) for k in range(1, len(right) + 1)]
    passed = [pass_at_k(len(right), int(sum(right)), k) for k in range(1, len(right) + 1)]
    assert found == pytest.approx(passed)
    assert all(more >= less - 1e-12 for less, more in itertools.pairwise(value or 0.0 for value in found))
    # The same on the pool itself: the best of the first k samples is no worse than the best of fewer.
    best = [max(right[:k]) for k in range(1, len(right) + 1)]
    assert best == sorted(best)


@given(st.lists(st.sampled_from(["7", "8", "9", None]), min_size=1, max_size=24), st.data())
def test_majority_is_maj_at_k_where_one_text_is_right(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    right = [float(answer == "7") for answer in answers]
    assert majority_at_k(answers, right, k) == pytest.approx(maj_at_k(answers, "7", k))


def test_spellings_of_the_right_answer_do_not_vote_together() -> None:
    # maj@k joins them by the key; a strategy sees three different answers and a tie of one vote each.
    assert majority_at_k(["0.5", "half", "2"], [1.0, 1.0, 0.0], 3) == pytest.approx(2 / 3)


def test_weighted_votes_are_means_over_disjoint_blocks() -> None:
    question = PooledQuestion(["a", "b", "a", "b", "b"], [1.0, 0.0, 1.0, 0.0, 0.0], [1] * 5)
    # Blocks (a 0.1, b 0.9) and (a 0.8, b 0.2); the fifth sample is in none.
    assert weighted_vote_at_k(question, [0.1, 0.9, 0.8, 0.2, 1.0], 2, None, False) == 0.5
    assert weighted_vote_at_k(question, [0.1, 0.9, 0.8, 0.2, 1.0], 5, None, False) == 0.0
    assert weighted_vote_at_k(question, [None, None, 0.8, 0.2, 1.0], 2, None, False) == 1.0
    assert weighted_vote_at_k(question, [None] * 5, 2, None, False) is None


def test_scores_that_cannot_weigh_votes_are_named() -> None:
    question = PooledQuestion(["a"], [1.0], [1], {"s": [-2.0]})
    plain, borda = strategy_record("weighted_vote"), strategy_record("weighted_vote", borda=1.0)
    assert "gave -2" in (check_weights(plain, [question], "s", False) or "")
    assert check_weights(borda, [question], "s", False) is None
    assert check_weights(plain, [question], "s", True) is None


@pytest.mark.parametrize("name", ["majority", "weighted_vote", "best_of_n"])
def test_with_the_whole_pool_the_estimate_is_what_the_strategy_chooses(name: str) -> None:
    chances = {"1": 0.4, "2": 0.35, "3": 0.25}
    values = {"1": 0.2, "2": 0.9, "3": 0.4}
    for seed in range(8):
        model = lambda text: chances if text.endswith("?") else {"$": 1.0}  # noqa: E731
        search, program = solve(name, model, score=values.__getitem__, n=6, seed=seed)
        assert program.choice is not None
        texts = [search.text(node) for node in search.nodes[1:]]
        right = [float(text == "2") for text in texts]
        question = PooledQuestion(texts, right, [1] * 6, {"s": [values[text] for text in texts]})
        chosen = float(search.text(program.choice.node) == "2")
        found = pooled_accuracy(strategy_record(name, n=6), question, 6, "s", False)
        tied = name == "majority" and sorted(map(texts.count, set(texts)))[-2:] in ([2, 2], [3, 3])
        assert tied or found == chosen  # a tie has the mean over all orders of the pool


def test_strategies_on_parallel_samples_are_answered_by_the_pool_and_others_are_run() -> None:
    names = {str(r.model_fields["name"].default) for r in STRATEGY_RECORDS if is_pooled(r())}
    assert names == {"single", "majority", "weighted_vote", "best_of_n"}
    assert [strategy_record("single").at_budget(k) is None for k in (1, 2)] == [False, True]
    sized = strategy_record("best_of_n", verifier={"name": "oracle"}).at_budget(3)
    assert sized == strategy_record("best_of_n", n=3, verifier={"name": "oracle"})


def test_every_strategy_has_a_size_for_a_budget_of_eight_answers() -> None:
    sized = {str(r.model_fields["name"].default): r().at_budget(8) for r in STRATEGY_RECORDS}
    assert {name for name, record in sized.items() if record is None} <= {"single", "step_values"}
    assert sized["revise"] == strategy_record("revise", rounds=7)
    assert strategy_record("revise", chains=2).at_budget(8) == strategy_record("revise", chains=2, rounds=3)
    assert strategy_record("revise", chains=3).at_budget(8) is None
    assert sized["budget_forcing"] == strategy_record("budget_forcing", waits=7)
    levels = sized["by_difficulty"].levels  # type: ignore[union-attr]
    assert ([level.strategy.n for level in levels], sized["by_difficulty"].probe) == ([2, 8], 2)  # type: ignore[union-attr]


def test_only_several_answers_to_one_question_need_a_temperature() -> None:
    greedy = [("single", {}), ("majority", {"n": 1}), ("revise", {}), ("budget_forcing", {})]
    assert not any(strategy_record(name, **options).needs_variety for name, options in greedy)
    varied = [("majority", {}), ("revise", {"chains": 2}), ("budget_forcing", {"n": 2}), ("by_difficulty", {})]
    assert all(strategy_record(name, **options).needs_variety for name, options in varied)
