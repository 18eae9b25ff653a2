"""REBASE's allocation in numbers, and a search worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.core.engine import Request
from burnish.evaluation.strategies.rebase import balanced_widths
from tests.evaluation.strategies.toy import solve


@pytest.mark.parametrize(
    ("scores", "total", "temperature", "widths"),
    [
        # e = 1, 0.1353, 0.0498: 8 / 1.1851 = 6.75 -> 7; 1 * 0.1353 / 0.1851 = 0.73 -> 1; nothing is left.
        ([0.9, 0.5, 0.3], 8, 0.2, [7, 1, 0]),
        ([0.9, 0.5, 0.3], 8, 1000.0, [3, 3, 2]),  # a high temperature shares equally
        ([0.9, 0.5, 0.3], 8, 0.001, [8, 0, 0]),
        ([0.4, 0.4, 0.4, 0.4], 6, 0.2, [2, 2, 1, 1]),
        ([0.2, 0.2, 0.2], 6, 0.7, [2, 2, 2]),
        # e = 1, 0.8825, 0.7788: 5 / 2.6613 = 1.88 -> 2; 3 * 0.8825 / 1.6613 = 1.59 -> 2; 1
        ([-1.0, -1.025, -1.05], 5, 0.2, [2, 2, 1]),
    ],
)
def test_children_are_shared_out_by_the_softmax_of_scores(
    scores: list[float], total: int, temperature: float, widths: list[int]
) -> None:
    assert balanced_widths(scores, total, temperature) == widths


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=40), st.integers(0, 300), st.floats(0.01, 10))
def test_widths_add_up_and_no_path_has_fewer_than_its_rounded_down_share(
    scores: list[float], total: int, temperature: float
) -> None:
    scores = sorted(scores, reverse=True)
    widths = balanced_widths(scores, total, temperature)
    assert sum(widths) == total
    assert min(widths) >= 0
    first = math.exp(0) / math.fsum(math.exp((score - scores[0]) / temperature) for score in scores)
    assert widths[0] == math.ceil(total * first - 1e-9)


def test_finished_answers_leave_the_budget_of_children_and_n_answers_are_made() -> None:
    replies = {
        "": ["a,", "b,", "1$", "c,"],
        "a,": ["2$", "2$", "x,"],  # with T = 0.2: e = 1, 0.1353, 0.0498; 3 / 1.1851 = 2.53 -> 3
        "a,x,": ["3$"],  # one of four is left
    }
    scores = {"a,": 0.9, "b,": 0.5, "c,": 0.3, "1": 0.8, "a,2": 0.45, "a,x,": 0.1, "a,x,3": 0.7}
    seen: list[Request] = []
    search, program = solve("rebase", replies, score=scores.__getitem__, kind="number", n=4, step=",", seen=seen)
    assert program.choice is not None, program.error
    assert [search.tokenizer.decode(request.tokens)[1:] for request in seen] == [""] * 4 + ["a,"] * 3 + ["a,x,"]
    assert [node.notes.get("width") for node in search.nodes[1:5]] == [3, 0, None, 0]
    assert program.choice.votes == pytest.approx({"1": 0.8, "2": 0.9, "3": 0.7})
    assert search.text(program.choice.node) == "a,2"
    assert program.choice.numbers == {"finished": 4, "cut": 0, "steps": 3}


def test_a_path_whose_scoring_failed_counts_as_the_worst() -> None:
    replies = {"": ["a,", "b,", "c,", "d,"], "a,": ["1$"], "b,": ["2$"], "d,": ["4$"], "c,": ["3$"]}
    scores = {"a,": None, "b,": 0.2, "c,": 0.2, "d,": 0.2, "a,1": 0.1, "b,2": 0.2, "c,3": 0.3, "d,4": 0.9}
    search, _ = solve("rebase", replies, score=scores.__getitem__, n=4, step=",")
    assert [node.notes["width"] for node in search.nodes[1:5]] == [1, 1, 1, 1]
    assert [search.text(node) for node in search.nodes[5:]] == ["b,2", "c,3", "d,4", "a,1"]


def test_a_vote_of_negative_scores_says_what_to_do() -> None:
    _, program = solve("rebase", {"": ["1$", "2$"]}, score=lambda text: -1.0, n=2)
    assert program.error is not None
    assert "votes weighed by negative scores are meaningless: set strategy.choose=best" in program.error
    _, program = solve("rebase", {"": ["1$", "2$"]}, score=lambda text: -float(text), n=2, choose="best")
    assert program.choice is not None
