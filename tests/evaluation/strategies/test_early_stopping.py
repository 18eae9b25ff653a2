"""Early stopping: each rule on cases by hand and against independent oracles; rule `certain` never changes the result of majority."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from burnish.evaluation.strategies.early_stopping import is_certain, lead_probability
from burnish.evaluation.strategies.registry import strategy_record
from burnish.evaluation.strategies.votes import count_votes, winner
from tests.evaluation.strategies.toy import END, NextCharacter, solve

ANSWERS = st.lists(st.sampled_from(["a", "b", "c", None]), max_size=9)


def always(answer: str) -> NextCharacter:
    return lambda text: {answer: 1.0} if text.endswith("?") else {END: 1.0}


def dice(sides: int) -> NextCharacter:
    """One of the first digits; the lower ones are likelier."""
    return lambda text: {str(k): 1.0 / (k + 1) for k in range(sides)} if text.endswith("?") else {END: 1.0}


@given(drawn=ANSWERS, num_left=st.integers(0, 5))
def test_a_vote_is_certain_exactly_if_no_further_answers_change_its_winner(
    drawn: list[str | None], num_left: int
) -> None:
    won = winner(count_votes(drawn))
    # The worst that can come is that all further answers are the same, be it a new one ("z").
    others = [winner(count_votes([*drawn, *[rival] * num_left])) for rival in ("a", "b", "c", "z")]
    assert is_certain(drawn, num_left) == all(other == won for other in others)


@pytest.mark.parametrize("budget", [None, 7, 20, 33])
@pytest.mark.parametrize("window", [1, 3, 4, 12])
@pytest.mark.parametrize("sides", [1, 2, 5])
def test_the_certain_rule_gives_the_choice_of_majority_for_fewer_tokens(
    sides: int, window: int, budget: int | None
) -> None:
    spent, full = 0, 0
    for seed in range(12):
        majority = solve("majority", dice(sides), seed=seed, n=12, budget=budget)[0:2]
        search, program = solve("early_stopping", dice(sides), seed=seed, n=12, window=window, budget=budget)
        assert program.choice is not None
        assert majority[1].choice is not None
        assert program.choice.node.key == majority[1].choice.node.key
        assert program.choice.node.tokens == majority[1].choice.node.tokens
        assert search.cost.tokens <= majority[0].cost.tokens
        spent, full = spent + search.cost.tokens, full + majority[0].cost.tokens
    if sides == 1 and window < 12 and budget is None:
        assert spent < full


def test_the_certain_rule_stops_as_soon_as_the_lead_is_as_large_as_what_is_left() -> None:
    # All answers are equal: after 8 of 16 the other 8 could at most tie, and the first answer wins ties.
    search, program = solve("early_stopping", always("1"), n=16, window=1)
    assert program.choice is not None
    assert program.choice.numbers == {"stopped_after": 8.0}
    assert program.choice.votes == {"1": 8.0}
    assert search.cost.tokens == 16


def test_the_unanimous_rule_stops_at_the_first_window_with_one_answer() -> None:
    search, program = solve("early_stopping", dice(2), n=40, window=3, rule="unanimous", seed=3)
    said = [search.answer(node) for node in search.nodes[1:]]
    windows = [set(said[k : k + 3]) for k in range(0, len(said), 3)]
    assert [len(window) for window in windows] == [2] * (len(windows) - 1) + [1]
    assert len(windows) > 1
    assert program.choice is not None
    assert program.choice.numbers["stopped_after"] == len(said)


def test_a_window_without_answers_is_not_unanimous() -> None:
    search, _ = solve("early_stopping", lambda text: {END: 1.0}, n=6, window=2, rule="unanimous")
    assert len(search.nodes) == 7


@pytest.mark.parametrize(("confidence", "stopped_after"), [(0.93, 3), (0.95, 4), (0.99, 6)])
def test_the_beta_rule_stops_where_the_posterior_exceeds_the_confidence(confidence: float, stopped_after: int) -> None:
    # After k equal answers P = 1 - 2^-(k + 1): 0.9375, 0.96875, 0.984375, 0.9921875 for k = 3 to 6.
    _, program = solve("early_stopping", always("1"), n=16, window=1, rule="beta", confidence=confidence)
    assert program.choice is not None
    assert program.choice.numbers == {"stopped_after": float(stopped_after)}


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (4, 1), (7, 7), (30, 18), (200, 170)])
def test_the_lead_probability_is_the_upper_half_of_a_beta_distribution(first: int, second: int) -> None:
    points = np.linspace(0.5, 1.0, 200_001)[1:-1]
    log_norm = math.lgamma(first + second + 2) - math.lgamma(first + 1) - math.lgamma(second + 1)
    density = np.exp(log_norm + first * np.log(points) + second * np.log1p(-points))
    assert lead_probability(first, second) == pytest.approx(float(density.mean()) / 2, abs=2e-4)


def test_a_budget_ends_the_windows() -> None:
    search, program = solve("early_stopping", dice(5), n=16, window=4, max_tokens=2, budget=9)
    assert search.cost.tokens == 9
    assert program.choice is not None
    assert program.choice.numbers["stopped_after"] == 5


def test_a_confidence_without_the_rule_that_reads_it_is_an_error() -> None:
    with pytest.raises(ValidationError, match="confidence is for rule beta, and rule is certain"):
        strategy_record("early_stopping", confidence=0.9)
