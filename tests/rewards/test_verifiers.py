from __future__ import annotations

import importlib.util
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.rewards.verifiers import (
    NEEDS_ANSWER,
    VERIFIERS,
    check_verifier,
    choice,
    exact,
    format,
    last_boxed,
    last_number,
    math,
    needs_answer,
    number,
)

needs_math = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")


def test_exact_ignores_only_surrounding_space_and_case_on_request():
    assert exact(" 005578\n", "005578", {}) == 1.0
    assert exact("00 5578", "005578", {}) == 0.0
    assert exact("paris", "Paris", {}) == 0.0
    assert exact("paris", "Paris", {}, ignore_case=True) == 1.0
    assert exact("7", 7, {}) == 1.0
    assert exact("<think>a</think><answer> 4 </answer>", "4", {}) == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so it is 42.", Fraction(42)),
        ("$1,234.50", Fraction(2469, 2)),
        ("1{,}000", Fraction(1000)),
        ("first 3, then 12%", Fraction(12)),
        ("-3/4", Fraction(-3, 4)),
        ("x = -5", Fraction(-5)),
        ("10-5", Fraction(5)),
        ("−7", Fraction(-7)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\dfrac{1.5}{-2}", Fraction(-3, 4)),
        (".5", Fraction(1, 2)),
        ("2.5e-3", Fraction(1, 400)),
        ("1,2", Fraction(2)),
        ("no digits", None),
        ("1/0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
    ],
)
def test_last_number_is_read_exactly(text, value):
    assert last_number(text) == value


def test_number_prefers_box_then_hashes_then_the_last_number():
    assert number(r"\boxed{18} and 3 more", "18", {}) == 1.0
    assert number(r"\boxed{17} and then \boxed{18 \text{ dollars}}", "18", {}) == 1.0
    assert number("7 + 11 = 18 #### 18 (checked)", "She sells 9*2=18 eggs\n#### 18", {}) == 1.0
    assert number("I get 17, no, 18", "18", {}) == 1.0
    assert number("18, no, 17", "18", {}) == 0.0
    assert number("0.50", "1/2", {}) == 1.0
    assert number("0.3333", "1/3", {}) == 0.0
    assert number("nothing", "18", {}) == 0.0


def test_an_expected_answer_without_a_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="holds no number"):
        number("3", "three", {})


@pytest.mark.parametrize(
    "name", [n if n != "math" else pytest.param(n, marks=needs_math) for n in sorted(NEEDS_ANSWER)]
)
@pytest.mark.parametrize("missing", [None, float("nan"), [None]])
def test_a_missing_expected_answer_is_an_error_not_something_to_match(name, missing):
    options = {"rule": "simple_rl", "checker": "exact"} if name == "rule_scores" else {}
    for completion in ("None", r"\boxed{None}", "<answer>nan</answer>", "[None]"):
        with pytest.raises(ValueError, match=r"no expected answer|is one JSON object"):
            VERIFIERS[name](completion, missing, {}, **options)


def test_verifiers_say_whether_they_need_an_answer():
    without = ["format", "language", "row", "task", "think_format"]
    assert sorted(name for name in VERIFIERS if not needs_answer(name)) == without
    assert all(VERIFIERS[name]("x", None, {}, **o) == 0.0 for name, o in (("format", {}), ("think_format", {})))


@given(st.text(max_size=200))
def test_no_completion_makes_a_verifier_raise(text):
    for name, gold in (("exact", "1"), ("number", "1"), ("choice", "A"), ("format", "")):
        assert VERIFIERS[name](text, gold, {}) in (0.0, 1.0)


@given(st.fractions(min_value=-(10**9), max_value=10**9))
def test_every_fraction_survives_being_written_down(value):
    assert last_number(f"the answer is {value.numerator}/{value.denominator}.") == value


def test_last_boxed_balances_braces_and_skips_what_is_left_open():
    assert last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} \boxed{2} \boxed{3") == "2"
    assert last_boxed(r"\boxed{\{1\}}") == r"\{1\}"
    assert last_boxed("{a}") is None
    assert last_boxed(r"\boxed{" * 3000) is None


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "(b)",
        "b.",
        "**B**",
        "The answer is B",
        "not (A); the answer is (B)",
        "Answer: b",
        "First A looked right. The answer is **B** because of C.",
        r"\boxed{B}",
        r"so \boxed{\text{(B)}}",
        "A is wrong, so (B)",
        "B. Paris",
        "<think>A? C?</think><answer>B</answer>",
    ],
)
def test_choice_finds_the_letter(text):
    assert choice(text, "B", {}) == 1.0
    assert choice(text, "(b)", {}) == 1.0
    assert choice(text, "A", {}) == 0.0


@pytest.mark.parametrize("text", ["The answer is a number", "The answer is I think unclear", "Because", "", "ABCD"])
def test_words_are_not_choices(text):
    assert [choice(text, letter, {}) for letter in "ABCDEFGHIJ"] == [0.0] * 10


def test_a_choice_that_is_no_letter_is_an_error():
    with pytest.raises(ValueError, match="no choice letter"):
        choice("B", "Paris", {})


def test_format_is_r1_by_default():
    assert format("<think>a</think><answer>4</answer>", "4", {}) == 1.0
    assert format("\n<think>a\nb</think>\n<answer>4</answer>\n", "4", {}) == 1.0
    assert format("<answer>4</answer>", "4", {}) == 0.0
    assert format("<think>a</think><answer>4</answer><answer>4</answer>", "4", {}) == 0.0
    assert format("<think>a<think>b</think></think><answer>4</answer>", "4", {}) == 0.0
    assert format("<answer>4</answer><think>a</think>", "4", {}) == 0.0
    assert format("<think> \n</think><answer>4</answer>", "4", {}) == 0.0
    assert format("<think>a</think> so <answer>4</answer>", "4", {}) == 0.0
    assert format("ab\ncd", "", {}, pattern="ab.*cd") == 1.0
    assert format("xab cd", "", {}, pattern="ab.*cd") == 0.0


@needs_math
@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{0.5}", r"\frac12", 1.0),
        (r"$x^2+2x+1$", "(x+1)^2", 1.0),
        (r"\boxed{11\sqrt2}", r"11\sqrt{2}", 1.0),
        (r"\boxed{11}", r"11\sqrt{2}", 0.0),
        (r"\boxed{36}", r"\$36", 1.0),
        ("<think>a</think><answer>4</answer>", "4", 1.0),
        (r"<think>a</think><answer>\frac{x}{2}</answer>", "x/2", 1.0),
        ("<think>4</think><answer>the value is 5</answer>", "4", 0.0),
        ("I do not know", "4", 0.0),
        (r"\boxed{\frac{1}{", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math_compares_expressions(completion, answer, expected):
    assert math(completion, answer, {}) == expected


@needs_math
@pytest.mark.parametrize(
    ("answer", "said"), [("\\boxed{}", "cannot parse the expected answer"), (" ", "no expected answer to compare with")]
)
def test_math_refuses_an_expected_answer_it_cannot_parse(answer, said):
    with pytest.raises(ValueError, match=said):
        math("4", answer, {})


def test_options_are_checked_before_a_run():
    with pytest.raises(UserError, match="did you mean 'pattern'"):
        check_verifier("format", {"patern": "x"}, "reward.parts[0]")
    with pytest.raises(UserError, match=r"reward\.parts\[0\].*takes no options"):
        check_verifier("number", {"tolerance": 1}, "reward.parts[0]")
    with pytest.raises(UserError, match="no regular expression"):
        check_verifier("format", {"pattern": "("}, "reward.parts[0]")


def test_missing_math_verify_is_named_before_a_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'burnish\[math\]'"):
        check_verifier("math", {}, "reward.parts[0]")
