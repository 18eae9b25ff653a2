"""Searches as text: every node on one line, children below their parent, and the chosen path always among what is shown."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from burnish.evaluation.strategies.search_text import clipped, columns, tree_lines, votes_lines


def node(number: int, parent: int | None, text: str, **values: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"node": number, "parent": parent, "text": text, "tokens": 2, "sampled": parent is not None}
    return given | {"end": "stop", "score": None, "chosen": False} | values


TREE = [
    node(0, None, "What is 2+2?", chosen=True),
    node(1, 0, "Add\nthem.", chosen=True, score=0.5, visits=3),
    node(2, 0, "Guess."),
    node(3, 1, "4", chosen=True, score=0.25),
    node(4, 2, "5", end="length"),
    node(5, 2, "", tokens=0, sampled=False),
]


def test_a_tree_is_printed_depth_first_with_its_facts() -> None:
    assert tree_lines(TREE, 80) == [
        "* What is 2+2?  (prompt)",
        "*   Add them.  (score 0.5, visits 3, 2 tokens)",
        "*     4  (score 0.25, 2 tokens)",
        "    Guess.  (2 tokens)",
        "      5  (2 tokens, cut at its limit)",
        "      (no text)  (0 tokens, not sampled: the budget was spent)",
    ]


def test_a_short_tree_keeps_the_chosen_path_and_counts_the_rest() -> None:
    lines = tree_lines(TREE, 80, max_lines=4)
    assert [line for line in lines if line.startswith("* ")] == [
        line for line in tree_lines(TREE, 80) if line.startswith("* ")
    ]
    assert lines[-1] == "  ... and 3 nodes more"


@given(st.text(max_size=300), st.integers(40, 120), st.integers(0, 30))
def test_no_line_is_wider_than_the_terminal(text: str, width: int, depth: int) -> None:
    deep = [node(0, None, text)] + [node(k, k - 1, text, score=1.25, note="n" * 50) for k in range(1, depth)]
    assert all(columns(line) <= max(width, 62) for line in tree_lines(deep, width))
    assert columns(clipped(text, width)) <= width


def test_votes_are_ranked_and_the_many_others_are_added_up() -> None:
    votes = {"a": 1.0, "b": 3.0, "c": 1.0, "d": 0.5}
    assert votes_lines(votes, 40, limit=2) == ["b  3", "a  1", "... and 2 others with 1.5 together"]
