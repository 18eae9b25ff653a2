"""Beam search and DVTS, worked by hand from scripted replies."""

import pytest
from pydantic import ValidationError

from burnish.core.engine import Request
from burnish.evaluation.strategies.registry import strategy_record
from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from tests.evaluation.strategies.toy import solve

REPLIES = {
    "": ["a,", "b,", "a,", "c,"],
    "b,": ["1$", "x,"],
    "c,": ["y,", "y,"],
    "c,y,": ["2$", "x2$"],
}
SCORES = {"a,": 0.3, "b,": 0.9, "c,": 0.5, "b,1": 0.8, "b,x,": 0.2, "c,y,": 0.6, "c,y,2": 0.7, "c,y,x2": 0.4}


def chosen(search: Search, program: SearchProgram) -> tuple[str, Choice]:
    assert program.choice is not None, program.error
    return search.text(program.choice.node), program.choice


def beam(**options: object) -> tuple[Search, SearchProgram]:
    return solve("beam_search", REPLIES, score=SCORES.__getitem__, kind="number", n=4, beams=2, step=",", **options)


def test_a_beam_keeps_the_best_distinct_paths_and_a_finished_answer_keeps_its_place() -> None:
    # Of a, b, a, c the best two are b and c. Of their children 1 has ended and y stays: one place is left, which gets two children.
    seen: list[Request] = []
    search, program = beam(seen=seen)
    text, choice = chosen(search, program)
    assert text == "b,1"
    assert choice.numbers == {"finished": 3, "cut": 0, "steps": 3}
    contexts = [search.tokenizer.decode(request.tokens)[1:] for request in seen]
    assert contexts == ["", "", "", "", "b,", "b,", "c,", "c,", "c,y,", "c,y,"]
    assert (search.cost.requests, search.cost.context_tokens) == (10, 4 * 1 + 4 * 3 + 2 * 5)
    assert search.cost.scores == 8  # equal texts are scored once


def test_finished_answers_vote_with_their_scores() -> None:
    text, choice = chosen(*beam(choose="vote"))
    assert choice.votes == pytest.approx({"1": 0.8, "2": 0.7 + 0.4})
    assert text == "c,y,2"


def test_fewer_distinct_paths_than_places_share_the_children_of_all_places() -> None:
    replies = {"": ["a,"] * 6, "a,": ["1$", "2$", "3$", "b,", "c,", "c,"], "a,b,": ["4$"], "a,c,": ["5$", "6$"]}
    values = {"a,1": 0.1, "a,2": 0.9, "a,3": 0.2, "a,c,6": 0.1, "a,b,": 0.5, "a,c,": 0.6, "a,c,5": 0.3, "a,b,4": 0.4}
    seen: list[Request] = []
    score = {"a,": 0.5, **values}.__getitem__
    search, program = solve("beam_search", replies, score=score, n=6, beams=6, step=",", seen=seen)
    # Six children of a; 1, 2 and 3 keep three of the six places; b and c share the other three: two for c and one for b.
    assert [search.tokenizer.decode(request.tokens)[1:] for request in seen[12:]] == ["a,c,", "a,c,", "a,b,"]
    assert chosen(search, program)[0] == "a,2"


def test_scores_that_failed_rank_behind_all_others() -> None:
    replies = {"": ["a,", "b,"], "b,": ["1$", "2$"]}
    values = {"a,": None, "b,": 0.1, "b,1": None, "b,2": 0.2}
    assert chosen(*solve("beam_search", replies, score=values.__getitem__, n=2, beams=1, step=","))[0] == "b,2"


def test_subtrees_of_dvts_do_not_see_one_another() -> None:
    # The first subtree has a and b, the second b and c: both go on with b, which a beam of two would keep once.
    replies = {"": ["a,", "b,", "b,", "c,"], "b,": ["1$", "x,", "2$", "3$"], "b,x,": ["4$", "5$"]}
    values = {
        "a,": 0.3,
        "b,": 0.9,
        "c,": 0.5,
        "b,1": 0.1,
        "b,x,": 0.6,
        "b,2": 0.3,
        "b,3": 0.2,
        "b,x,4": 0.7,
        "b,x,5": 0.8,
    }
    seen: list[Request] = []
    search, program = solve("dvts", replies, score=values.__getitem__, n=4, subtrees=2, step=",", seen=seen)
    text, choice = chosen(search, program)
    assert [search.tokenizer.decode(request.tokens)[1:] for request in seen] == [""] * 4 + ["b,"] * 4 + ["b,x,"] * 2
    assert text == "b,x,5"
    assert choice.numbers == {"finished": 5, "cut": 0, "steps": 3}


def letters(text: str) -> dict[str, float]:
    """Writes letters and commas, and ends at any place."""
    return {"a": 0.3, "b": 0.3, ",": 0.3, "$": 0.1}


def test_dvts_with_one_subtree_is_a_beam_of_one() -> None:
    made = [
        solve(name, letters, score=lambda text: -len(text) % 7 / 7, n=4, step=",", **one)
        for name, one in (("beam_search", {"beams": 1}), ("dvts", {"subtrees": 1}))
    ]
    (first, _), (second, _) = made
    assert [first.text(node) for node in first.nodes] == [second.text(node) for node in second.nodes]
    assert chosen(*made[0])[0] == chosen(*made[1])[0]


def test_steps_end_after_their_number_of_tokens() -> None:
    search, _ = solve("beam_search", lambda text: {"a": 1.0}, n=2, beams=1, step=None, step_tokens=5, max_tokens=12)
    assert [len(node.tokens) for node in search.nodes[1:]] == [5, 5, 5, 5, 2, 2]
    assert {node.end for node in search.nodes[-2:]} == {"length"}


def test_candidates_that_cannot_be_shared_out_equally_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"n=16 is not a multiple of beams=5.* set n to 15 or 20"):
        strategy_record("beam_search", n=16, beams=5)
    with pytest.raises(ValidationError, match=r"n=2 is not a multiple of subtrees=4.* set n to 4"):
        strategy_record("dvts", n=2)
    with pytest.raises(ValidationError, match="nothing ends a step"):
        strategy_record("rebase", step=None)
