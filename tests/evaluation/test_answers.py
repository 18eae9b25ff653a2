r"""Answers read out of completions: what votes alike, and what is in format."""

import pytest

from burnish.config.data import RewardPart
from burnish.evaluation.answers import Answer, marked_answer, normal_spelling, read_answer, verifier_of


@pytest.mark.parametrize(
    ("kind", "completion", "expected"),
    [
        ("number", r"so \boxed{1,234.50}", Answer("2469/2", True)),
        ("number", "so it is 7", Answer("7", False)),
        ("number", "3 + 4 = 7\n#### 7", Answer("7", True)),
        ("number", r"\boxed{}", Answer(None, False)),
        ("number", "no idea", Answer(None, False)),
        ("math", r"thus $\boxed{\dfrac{1}{2}}$", Answer("1/2", True)),
        ("math", r"<answer>\left( 3, \frac{\pi}{2} \right)</answer>", Answer(r"(3,\frac{\pi}{2})", True)),
        ("math", "it is 5", Answer(None, False)),
        ("choice", "The answer is (B).", Answer("B", True)),
        ("choice", "who knows", Answer(None, False)),
        ("exact", "  blue \n", Answer("blue", None)),
        ("task", "", Answer(None, None)),
        ("code", "```python\nprint(1)\n```", Answer(None, True)),
        ("code", "print(1)", Answer(None, False)),
        ("answer_set", r"\boxed{3, -5}", Answer("3,-5", True)),
        ("code_output", "It is <answer>'a  b'</answer>", Answer("'a  b'", True)),
        ("code_input", "f(1)", Answer(None, False)),
        ("ifeval", "anything", Answer(None, None)),
        ("mine.py:judge", r"\boxed{4}", Answer("4", None)),
        ("mine.py:judge", "four", Answer(None, None)),
    ],
)
def test_each_verifier_has_its_way_of_reading(kind: str, completion: str, expected: Answer) -> None:
    assert read_answer(kind, completion) == expected


@pytest.mark.parametrize(
    "spellings",
    [
        (r"\frac{1}{2}", r"\dfrac{1}{2}", "0.5", "0.50", "1/2", r" \frac{1}{2} ", r"$\tfrac{1}{2}$"),
        ("1,000", "1000", "1000.0", r"1{,}000".replace("{,}", ",")),
        (r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\text{red}", "red", r"\mathrm{red}."),
        (r"90^\circ", "90", r"90^{\circ}"),
    ],
)
def test_spellings_of_the_same_answer_vote_alike(spellings: tuple[str, ...]) -> None:
    assert len({normal_spelling(text) for text in spellings}) == 1


def test_different_answers_stay_different() -> None:
    answers = ["1", "-1", "1/2", r"\frac{1}{3}", "x^2", "x_2", "(1,2)", "(2,1)", "1,2", "12", r"\frac{a}{2}"]
    assert len({normal_spelling(text) for text in answers}) == len(answers)
    assert normal_spelling("1/0") == "1/0"


def test_the_last_mark_wins_and_an_empty_one_is_none() -> None:
    assert marked_answer(r"\boxed{1} then \boxed{2}") == "2"
    assert marked_answer(r"<answer>\boxed{3}</answer> \boxed{4}") == "3"
    assert marked_answer("#### ") is None
    assert marked_answer("") is None


def test_the_first_part_that_judges_a_row_reads_its_answer() -> None:
    parts = [RewardPart(name="format"), RewardPart(name="number", sources=["gsm8k"]), RewardPart(name="math")]
    assert verifier_of(parts, "gsm8k", {}) == "number"
    assert verifier_of(parts, "math500", {}) == "math"
    assert verifier_of([RewardPart(name="format")], "any", {}) == ""
    assert verifier_of([RewardPart(name="row")], "any", {"verifier": "choice"}) == "choice"
    assert (
        verifier_of([RewardPart(name="rule_scores", options={"rule": "deepscaler", "checker": "math"})], "a", {})
        == "math"
    )
