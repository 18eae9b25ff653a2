"""The built-in verifiers: what counts as an answer, and that errors in the data raise."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.data import Reward, Source
from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.data.row_formats import read_rows
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rewards.verifiers import (
    LANGUAGE_SCRIPTS,
    NEEDS_ANSWER,
    PUBLISHED_RULES,
    VERIFIERS,
    check_verifier,
    choice,
    count_words_by_script,
    exact,
    format_verifier,
    language,
    last_boxed,
    last_number,
    math_verifier,
    number,
    qa,
    row_verifier,
    rule_scores,
    rule_total,
    think_format,
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
    with pytest.raises(ValueError, match="contains no number"):
        number("3", "three", {})


@pytest.mark.parametrize(
    "name", [n if n != "math" else pytest.param(n, marks=needs_math) for n in sorted(NEEDS_ANSWER)]
)
@pytest.mark.parametrize("missing", [None, float("nan"), [None]])
def test_a_missing_expected_answer_is_an_error_not_something_to_match(name, missing):
    options = {"rule": "simple_rl", "checker": "exact"} if name == "rule_scores" else {}
    for completion in ("None", r"\boxed{None}", "<answer>nan</answer>", "[None]"):
        with pytest.raises(ValueError, match=r"no expected answer|needs one JSON object"):
            VERIFIERS[name](completion, missing, {}, **options)


def test_verifiers_say_whether_they_need_an_answer():
    without = ["format", "language", "row", "task", "think_format"]
    assert sorted(name for name in VERIFIERS if name not in NEEDS_ANSWER) == without
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
    with pytest.raises(ValueError, match="not a choice letter"):
        choice("B", "Paris", {})


def test_format_is_r1_by_default():
    assert format_verifier("<think>a</think><answer>4</answer>", "4", {}) == 1.0
    assert format_verifier("\n<think>a\nb</think>\n<answer>4</answer>\n", "4", {}) == 1.0
    assert format_verifier("<answer>4</answer>", "4", {}) == 0.0
    assert format_verifier("<think>a</think><answer>4</answer><answer>4</answer>", "4", {}) == 0.0
    assert format_verifier("<think>a<think>b</think></think><answer>4</answer>", "4", {}) == 0.0
    assert format_verifier("<answer>4</answer><think>a</think>", "4", {}) == 0.0
    assert format_verifier("<think> \n</think><answer>4</answer>", "4", {}) == 0.0
    assert format_verifier("<think>a</think> so <answer>4</answer>", "4", {}) == 0.0
    assert format_verifier("ab\ncd", "", {}, pattern="ab.*cd") == 1.0
    assert format_verifier("xab cd", "", {}, pattern="ab.*cd") == 0.0


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
    assert math_verifier(completion, answer, {}) == expected


@needs_math
@pytest.mark.parametrize(
    ("answer", "said"), [("\\boxed{}", "cannot parse the expected answer"), (" ", "no expected answer to compare with")]
)
def test_math_refuses_an_expected_answer_it_cannot_parse(answer, said):
    with pytest.raises(ValueError, match=said):
        math_verifier("4", answer, {})


def test_options_are_checked_before_a_run():
    with pytest.raises(UserError, match="did you mean 'pattern'"):
        check_verifier("format", {"patern": "x"}, "reward.parts[0]")
    with pytest.raises(UserError, match=r"reward\.parts\[0\].*takes no options"):
        check_verifier("number", {"tolerance": 1}, "reward.parts[0]")
    with pytest.raises(UserError, match="not a valid regular expression"):
        check_verifier("format", {"pattern": "("}, "reward.parts[0]")


def test_missing_math_verify_is_named_before_a_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'burnish\[math\]'"):
        check_verifier("math", {}, "reward.parts[0]")


# --- think_format, language and rule_scores (ALGORITHMS.md 10.1 and 10.2) --------------------------------------------

GOOD = "<think>a</think><answer>4</answer>"


def test_the_worked_format_scores():
    assert number(GOOD, "4", {}) + think_format(GOOD, "4", {}) == 2.0
    assert (number("<answer>4</answer>", "4", {}), think_format("<answer>4</answer>", "4", {})) == (1.0, 0.0)
    assert think_format(GOOD + "<answer>4</answer>", "4", {}) == 0.0


def test_a_prompt_that_opened_the_thinking_is_counted_in():
    opened = GOOD.removeprefix("<think>")
    assert think_format(opened, "4", {}) == 0.0
    assert think_format(opened, "4", {}, opened=True) == 1.0
    assert think_format(GOOD, "4", {}, opened=True) == 0.0
    assert think_format("</think><answer>4</answer>", "4", {}, opened=True) == 0.0


def test_the_worked_language_shares():
    assert language("你好世界 hello", None, {}, target="zh") == 0.8
    assert language("你好世界 hello", None, {}, target="en") == 0.2


def test_only_the_thinking_counts_whether_or_not_it_was_opened_or_closed():
    assert language("<think>one two</think>你好", None, {}, target="en") == 1.0
    assert language("one two</think>你好", None, {}, target="en") == 1.0
    assert language("<think>one 你", None, {}, target="en") == 0.5


def test_what_is_no_prose_is_no_word():
    assert language("", None, {}, target="zh") == 1.0
    assert language("12 + 3 = 15!", None, {}, target="zh") == 1.0
    text = r"好 $x+y$ $$a b$$ \(c\) \[d\] \frac{1}{2} \boxed{abc} `code` \begin{align}a&b\end{align} 7"
    assert language(text, None, {}, target="zh") == 1.0
    assert language("好\n```python\nprint(x)\n```\n好", None, {}, target="zh") == 1.0
    assert language("好 ```print(x)", None, {}, target="zh") == 1.0
    assert language("好 costs $5, not six", None, {}, target="zh") == 0.25


def test_words_are_counted_by_script():
    assert dict(count_words_by_script("über Straße привет слово")) == {"LATIN": 2, "CYRILLIC": 2}
    assert dict(count_words_by_script("こんにちは カー 日々")) == {"HIRAGANA": 5, "KATAKANA": 2, "CJK": 2}
    assert dict(count_words_by_script("नमस्ते दुनिया")) == {"DEVANAGARI": 2}  # vowel signs do not end a word
    assert language("日本のカー", None, {}, target="ja") == 1.0
    assert language("안녕 세계 a", None, {}, target="ko") == pytest.approx(2 / 3)
    assert language("ｆｕｌｌ width", None, {}, target="en") == 1.0


@given(st.text(max_size=100), st.sampled_from(sorted(LANGUAGE_SCRIPTS)))
def test_a_share_is_a_share_for_any_text(text, target):
    assert 0.0 <= language(text, None, {}, target=target) <= 1.0


@pytest.mark.parametrize("part", [r"\(", r"\[", r"\begin{", r"\boxed{"])
def test_unclosed_openings_cost_one_pass(part):
    assert language(part * 30000, None, {}, target="zh") == 1.0


def test_the_totals_of_the_published_rules():
    right, wrong, silent, bare = GOOD, GOOD.replace("4", "5"), GOOD.replace("4", " "), "<answer>4</answer>"

    def totals(rule):
        return [rule_scores(text, "4", {}, rule=rule) for text in (right, wrong, silent, bare)]

    assert totals("logic_rl") == [3.0, -0.5, -1.0, -3.0]
    assert totals("simple_rl") == [1.0, -0.5, -1.0, 1.0]
    assert totals("deepscaler") == [1.0, 0.0, 0.0, 0.0]


def test_a_rule_asks_the_checker_it_is_told():
    text = "<think>a</think><answer>(b)</answer>"
    assert rule_scores(text, "B", {}, rule="simple_rl", checker="choice") == 1.0
    assert rule_scores(text, "B", {}, rule="simple_rl", checker="exact") == -0.5
    assert rule_scores("so 4", "4", {}, rule="simple_rl") == -1.0  # a number in running text is not an answer
    assert rule_scores("<think>4</think><answer> </answer>", "4", {}, rule="deepscaler") == 0.0


@pytest.mark.parametrize("rule", PUBLISHED_RULES)
def test_a_rule_pays_one_or_more_only_for_right(rule):
    for answered in (False, True):
        for formatted in (False, True):
            assert rule_total(rule, False, answered, formatted) < 1
    assert rule_total(rule, True, True, True) >= 1


def test_language_and_rule_options_are_checked_before_a_run():
    check_verifier("language", {"target": "zh"}, "here")
    check_verifier("rule_scores", {"rule": "logic_rl", "checker": "exact"}, "here")
    with pytest.raises(UserError, match=r"here: the option 'target' is missing \(one of: ar, "):
        check_verifier("language", {}, "here")
    with pytest.raises(UserError, match="here: target 'xx' is unknown"):
        check_verifier("language", {"target": "xx"}, "here")
    with pytest.raises(UserError, match=r"rule 'logic' is unknown \(one of: simple_rl, logic_rl, deepscaler\)"):
        check_verifier("rule_scores", {"rule": "logic"}, "here")
    with pytest.raises(UserError, match="checker 'judge' is unknown"):
        check_verifier("rule_scores", {"rule": "logic_rl", "checker": "judge"}, "here")
    with pytest.raises(UserError, match="did you mean 'opened'"):
        check_verifier("think_format", {"open": True}, "here")


def test_a_rule_with_the_math_checker_needs_math_verify(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'burnish\[math\]'"):
        check_verifier("rule_scores", {"rule": "simple_rl", "checker": "math"}, "here")


# --- qa and row ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "em", "f1"),
    [
        ("So <answer>The Beatles!</answer>", ["beatles"], 1.0, 1.0),
        ("\\boxed{New York City}", ["New York", "NYC"], 0.0, 0.8),
        ("14 December 1972", ["14 December 1972 UTC", "December 1972"], 0.0, 6 / 7),
        ("<answer></answer>", ["x"], 0.0, 0.0),
        ("no idea", ["Paris"], 0.0, 0.0),
        ("<answer>!!!</answer>", ["!!!"], 1.0, 1.0),
        ("<answer>the</answer>", ["The The"], 0.0, 2 / 3),
        ("<answer>wrong</answer> or <answer>Right</answer>", "right", 1.0, 1.0),
    ],
)
def test_short_answers_are_compared_as_words(completion: str, answer: Any, em: float, f1: float) -> None:
    assert qa(completion, answer, {}) == em
    assert qa(completion, answer, {}, metric="f1") == pytest.approx(f1)


def test_an_empty_expected_answer_raises() -> None:
    with pytest.raises(ValueError, match="no expected answer"):
        qa("x", [" "], {})
    with pytest.raises(UserError, match="metric 'bleu' is unknown"):
        check_verifier("qa", {"metric": "bleu"}, "here")


def test_a_row_may_name_its_own_verifier() -> None:
    assert row_verifier("<answer>Paris.</answer>", ["paris"], {"verifier": "qa"}) == 1.0
    assert row_verifier("it is 7", "7", {"verifier": "number"}) == 1.0
    assert row_verifier("it is 8", "7", {"verifier": "number"}) == 0.0
    with pytest.raises(ValueError, match="'rows' is not one of"):
        row_verifier("x", "y", {"verifier": "rows"})


def test_rows_of_several_verifiers_are_scored_by_one_part() -> None:
    requests = [
        ScoreRequest("a/0", "q", "#### 7", "gsm8k", "7", {"verifier": "number"}),
        ScoreRequest("a/1", "q", "<answer>Paris</answer>", "nq", ["paris"], {"verifier": "qa"}),
        ScoreRequest("a/2", "q", "London", "nq", ["paris"], {"verifier": "qa"}),
    ]
    with Rewards(Reward.model_validate({"parts": ["row"], "workers": 1})) as rewards:
        assert [score.accuracy for score in rewards.score(requests)] == [1.0, 1.0, 0.0]
        with pytest.raises(UserError, match="needs a column 'verifier'"):
            rewards.check([Row("b/0", "q", "b", "7")])


# --- published data sets ---------------------------------------------------------------------------------------------

SHARED = Path(__file__).parents[2] / "../shared/data"
FILES = {
    "gsm8k": "gsm8k_test.jsonl",
    "math": "math_train_rllm.json",
    "math500": "math500.jsonl",
    "aime24": "aime2024_orz.json",
    "amc": "amc_rllm.json",
    "deepscaler": "deepscaler_sub_1209.parquet",
    "nq": "nq_open_validation.jsonl",
    "hotpotqa": "hotpotqa_dev_simplified.json",
    "countdown": "countdown_rg_400.jsonl",
}


def answered(row: Row) -> str:
    """A completion with the published answer, in the format that its prompt asks for."""
    if row.extra["verifier"] == "task":
        return f"<answer>{row.extra['solution']}</answer>"
    if row.extra["verifier"] == "qa":
        return f"Let me see. <answer>{row.answer[-1]}</answer>"
    return f"So it is $\\boxed{{{row.answer}}}$."


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published data sets are not here")
@pytest.mark.parametrize("name", FILES)
def test_published_answers_are_right_and_none_is_wrong(name: str) -> None:
    rows = read_rows(Source(path=str(SHARED / FILES[name]), shape=name, limit=40))
    if rows[0].extra["verifier"] == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("math-verify is not installed")
    for row in rows:
        assert row_verifier(answered(row), row.answer, row.extra) == 1.0, row.id
        assert row_verifier("I do not know.", row.answer, row.extra) == 0.0, row.id
