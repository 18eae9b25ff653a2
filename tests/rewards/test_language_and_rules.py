"""The verifiers think_format, language and rule_scores (ALGORITHMS.md 10.1 and 10.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.rewards.verifiers import (
    LANGUAGES,
    RULES,
    check_verifier,
    count_words,
    language,
    number,
    rule_scores,
    rule_total,
    think_format,
)

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
    assert dict(count_words("über Straße привет слово")) == {"LATIN": 2, "CYRILLIC": 2}
    assert dict(count_words("こんにちは カー 日々")) == {"HIRAGANA": 5, "KATAKANA": 2, "CJK": 2}
    assert dict(count_words("नमस्ते दुनिया")) == {"DEVANAGARI": 2}  # vowel signs do not end a word
    assert language("日本のカー", None, {}, target="ja") == 1.0
    assert language("안녕 세계 a", None, {}, target="ko") == pytest.approx(2 / 3)
    assert language("ｆｕｌｌ width", None, {}, target="en") == 1.0


@given(st.text(max_size=100), st.sampled_from(sorted(LANGUAGES)))
def test_a_share_is_a_share_for_any_text(text, target):
    assert 0.0 <= language(text, None, {}, target=target) <= 1.0


@pytest.mark.parametrize("part", [r"\(", r"\[", r"\begin{", r"\boxed{"])
def test_openings_that_nobody_closes_cost_one_pass(part):
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
    assert rule_scores("so 4", "4", {}, rule="simple_rl") == -1.0  # a number in passing is no answer
    assert rule_scores("<think>4</think><answer> </answer>", "4", {}, rule="deepscaler") == 0.0


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_pays_one_or_more_only_for_right(rule):
    for answered in (False, True):
        for formatted in (False, True):
            assert rule_total(rule, False, answered, formatted) < 1
    assert rule_total(rule, True, True, True) >= 1


def test_options_are_checked_before_a_run():
    check_verifier("language", {"target": "zh"}, "here")
    check_verifier("rule_scores", {"rule": "logic_rl", "checker": "exact"}, "here")
    with pytest.raises(UserError, match=r"here: the option 'target' is missing \(one of: ar, "):
        check_verifier("language", {}, "here")
    with pytest.raises(UserError, match="here: target 'xx' is unknown"):
        check_verifier("language", {"target": "xx"}, "here")
    with pytest.raises(UserError, match=r"rule 'logic' is unknown \(one of: simple_rl, logic_rl, deepscaler\)"):
        check_verifier("rule_scores", {"rule": "logic"}, "here")
    with pytest.raises(UserError, match="checker 'task' is unknown"):
        check_verifier("rule_scores", {"rule": "logic_rl", "checker": "task"}, "here")
    with pytest.raises(UserError, match="did you mean 'opened'"):
        check_verifier("think_format", {"open": True}, "here")


def test_a_rule_with_the_math_checker_needs_math_verify(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'burnish\[math\]'"):
        check_verifier("rule_scores", {"rule": "simple_rl", "checker": "math"}, "here")
