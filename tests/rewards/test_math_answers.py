"""Sets of answers: any order, tolerances, signs, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from burnish.rewards.math_answers import (
    answer_set,
    given_answers,
    has_perfect_matching,
    number_value,
    read_answer_set,
    top_level_parts,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1, 2", ["1", "2"]),
        (r"(1,2), (3,4)", ["(1,2)", "(3,4)"]),
        (r"$3$ and $-5$", ["3", "-5"]),
        (r"3\text{ or }5; 7", ["3", "5", "7"]),
        (r"x=1,\quad y=2", ["x=1", "y=2"]),
        (r"\frac{1}{2}", [r"\frac{1}{2}"]),
        ("", []),
    ],
)
def test_an_answer_is_divided_outside_of_brackets(text: str, parts: list[str]) -> None:
    assert top_level_parts(text) == parts


def test_several_boxes_stand_for_several_answers() -> None:
    assert given_answers(r"\boxed{1} no, \boxed{2} and \boxed{3}", 2) == ["2", "3"]
    assert given_answers(r"\boxed{1} no, \boxed{2, 3}", 2) == ["2", "3"]
    assert given_answers(r"\boxed{(1, 2)}", 1) == ["(1, 2)"]
    assert given_answers("1 and 2", 2) == []


def test_a_matching_gives_every_answer_its_own() -> None:
    assert has_perfect_matching([[True, True], [True, False]])
    assert not has_perfect_matching([[True, False], [True, False]])
    assert has_perfect_matching([[True, True, False], [True, False, False], [False, True, True]])


def test_one_given_answer_does_not_count_for_two_within_the_tolerance() -> None:
    pytest.importorskip("math_verify")
    row = json.dumps({"answers": ["1.0", "1.05"], "tolerance": [0.1]})
    assert answer_set(r"\boxed{1.05, 1.0}", row, {}) == 1.0
    assert answer_set(r"\boxed{0.92, 1.12}", row, {}) == 1.0
    assert answer_set(r"\boxed{1.12, 1.13}", row, {}) == 0.0
    assert answer_set(r"\boxed{1.0}", row, {}) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.5", 1.5), ("14,000", 14000.0), (r"\frac{1}{4}", 0.25), (r"2\sqrt{4}", 4.0), ("x", None), ("inf", None), ("", None)],
)  # fmt: skip
def test_the_value_of_a_number_or_of_an_expression_of_numbers(text: str, value: float | None) -> None:
    pytest.importorskip("math_verify")
    assert number_value(text) == value


def test_a_tolerance_of_an_expression_with_letters_asks_for_equality() -> None:
    pytest.importorskip("math_verify")
    row = {"answers": ["2x+1"], "tolerance": [0.5]}
    assert (answer_set(r"\boxed{1+2x}", row, {}), answer_set(r"\boxed{2x+1.2}", row, {})) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("[1]", "an object with a list of texts"),
        ({"answers": []}, "an object with a list of texts"),
        ({"answers": [3]}, "an object with a list of texts"),
        ({"answers": ["1", "2"], "tolerance": [1, 2, 3]}, "2 answers with 3 tolerances"),
        ({"answers": ["1"], "tolerance": [-1]}, "a tolerance is a number from 0 on"),
        ("{", "Expecting"),
    ],
)
def test_an_expected_answer_of_another_form_is_an_error(answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_answer_set(answer)
