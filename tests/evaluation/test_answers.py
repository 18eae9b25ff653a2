r"""Answers read out of completions: what votes alike, and what is in format."""

import pytest

from burnish.config.data import RewardPart
from burnish.evaluation.answer_spelling import math_spelling, normal_spelling
from burnish.evaluation.answers import Answer, marked_answer, read_answer, verifier_of
from burnish.rewards.math_answers import math_verifier


@pytest.mark.parametrize(
    ("kind", "completion", "expected"),
    [
        ("number", r"so \boxed{1,234.50}", Answer("2469/2", True)),
        ("number", "so it is 7", Answer("7", False)),
        ("number", "3 + 4 = 7\n#### 7", Answer("7", True)),
        ("number", r"\boxed{}", Answer(None, False)),
        ("number", "no idea", Answer(None, False)),
        ("math", r"thus $\boxed{\dfrac{1}{2}}$", Answer("1/2", True)),
        ("math", r"<answer>\left( 3, \frac{\pi}{2} \right)</answer>", Answer(r"(3,\pi/2)", True)),
        ("math", "it is 5", Answer(None, False)),
        ("choice", "The answer is (B).", Answer("B", True)),
        ("choice", "who knows", Answer(None, False)),
        ("exact", "  blue \n", Answer("blue", None)),
        ("task", "", Answer(None, None)),
        ("code", "```python\nprint(1)\n```", Answer(None, True)),
        ("code", "print(1)", Answer(None, False)),
        ("answer_set", r"\boxed{3, -5}", Answer("-5,3", True)),
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
        (r"\frac{1}{2}", r"\dfrac{1}{2}", r"\frac12", "0.5", "0.50", "1/2", r" \frac{1}{2} ", r"$\tfrac{1}{2}$"),
        ("1,000", "1000", "1000.0", "1{,}000"),
        (r"\text{red}", "red", r"\mathrm{red}."),
        (r"90^\circ", "90", r"90^{\circ}"),
        (r"\$5", "5", "$5$"),
    ],
)
def test_answers_of_any_kind_are_compared_without_typography(spellings: tuple[str, ...]) -> None:
    assert len({normal_spelling(text) for text in spellings}) == 1
    assert len({math_spelling(text) for text in spellings}) == 1


EQUAL_MATHEMATICS = [
    (
        "5",
        r"\$5",
        "x=5",
        r"5\text{ cm}",
        r"5\text{ cm}^2",
        "5 cm",
        r"5\text{ miles per hour}",
        r"\{5\}",
        r"5\%",
        "5^{1}",
    ),
    (r"\frac{\pi}{2}", r"\pi/2", r"\frac{1}{2}\pi", r"0.5 \cdot \pi"),
    (r"\sqrt{8}", r"2\sqrt{2}", r"2\sqrt2", r"\frac{4}{\sqrt{2}}", r"8^{1/2}"),
    (r"\frac{3\sqrt{3}}{4}", r"\frac34\sqrt{3}", r"\sqrt{\frac{27}{16}}"),
    (r"\frac{7}{2}", r"3\frac{1}{2}", r"3\frac12", "3.5"),
    ("1024", "2^{10}", r"1.024\times10^3", r"1{,}024", r"1,\!024"),
    ("p-q", "-q+p", "-(q-p)"),
    ("(x-1)^2", "x^2-2x+1", "x(x-2)+1"),
    (r"\frac{1}{1-x}", r"-\frac{1}{x-1}", r"\frac{2}{2-2x}"),
    ("2x+3", "y=2x+3", "3 + 2 x"),
    (r"\{1,2\}", r"\{2,1\}", "1,2", "2, 1", r"x=1\text{ or }x=2"),
    (r"3\pm\sqrt{2}", r"3+\sqrt{2},3-\sqrt{2}"),
    (r"(3,\frac{\pi}{2})", r"\left( 3, \pi/2 \right)"),
    ("[0,1]", r"x\in[0,1]", r"\left[0,1\right]"),
    (r"(-\infty,0)\cup(1,\infty)", r"(1,\infty) \cup (-\infty, 0)"),
    ("x>3", "3<x"),
    (r"1\le x\leq 2", r"1\leqslant x \le 2"),
    (r"\begin{pmatrix} 1 \\ 0.5 \end{pmatrix}", r"\begin{pmatrix}1\\\frac12\end{pmatrix}"),
    ("A", r"\text{(A)}", r"\text{A}", "(A)"),
    (r"\text{Monday}", "Monday", "monday"),
]


@pytest.mark.parametrize("spellings", EQUAL_MATHEMATICS)
def test_equal_mathematics_votes_alike(spellings: tuple[str, ...]) -> None:
    assert len({math_spelling(text) for text in spellings}) == 1


def test_what_votes_alike_is_equal_for_the_verifier() -> None:
    for first, *_, last in EQUAL_MATHEMATICS:
        assert math_verifier(rf"\boxed{{{last}}}", first, {}) == 1, (first, last)


def test_different_answers_stay_different() -> None:
    answers = [
        "1",
        "-1",
        "1/2",
        r"\frac{1}{3}",
        "x^2",
        "x_2",
        "(1,2)",
        "(2,1)",
        "1,2",
        "12",
        r"\frac{a}{2}",
        "52_8",
        "52",
    ]
    assert len({normal_spelling(text) for text in answers}) == len(answers)
    assert normal_spelling("1/0") == "1/0"
    assert normal_spelling("1e999999999") == "1e999999999"
    answers += [
        "[1,2]",
        "[1,2)",
        r"x\ne2",
        "x<3",
        "x>3",
        r"x\ge3",
        "0.333",
        "2:3",
        "east",
        "seat",
        "ABC",
        "CBA",
        "2x",
        "x2",
        "0.1",
    ]
    answers += [
        r"5\text{ million}",
        "5",
        r"3\text{ PM}",
        r"3\text{ AM}",
        "3",
        r"10\%",
        r"\sqrt{x^2}",
        "x",
        "5!",
        r"\text{a}",
        "A",
        "1/2x",
    ]
    assert len({math_spelling(text) for text in answers}) == len(answers)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 900,
        "10^{10^{10}}",
        "((9^{99})^{99})^{99}",
        "(a+b+c)^{32}",
        "2^{" * 90 + "12" + "}" * 90,
        "1/0",
        "0^0",
        "",
    ],
)
def test_hostile_answers_are_compared_as_texts(text: str) -> None:
    assert math_spelling(text) == normal_spelling(text)


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
