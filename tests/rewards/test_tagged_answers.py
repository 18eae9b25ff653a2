"""Rewards of systems that search and answer in tags, with the numbers of their papers."""

from __future__ import annotations

import pytest

from burnish.rewards.tagged_answers import research, search_r1, sections, table_r1
from burnish.rewards.verifiers import qa

GOLD = ["Paris"]
ASKED = "<think>The capital?</think>\n<search>capital of France</search>\n\n<information>Doc 1(Title: France) {read}</information>\n\n"
FOUND, MISSED = ASKED.format(read="Its capital is Paris."), ASKED.format(read="It is a country.")


@pytest.mark.parametrize(
    ("completion", "em", "formatted"),
    [
        (FOUND + "<think>I see.</think><answer> the Paris! </answer>", 1.0, 1.0),
        (FOUND + "so <answer>Paris</answer>", 1.0, 0.8),
        (FOUND + "<think>Hm.</think><answer>Lyon</answer>", 0.0, 0.3),
        (MISSED + "<think>Hm.</think><answer>Lyon</answer>", 0.0, 0.2),
        (FOUND + "<answer>Lyon</answer>", 0.0, 0.1),
        (FOUND + "<think>It is Paris.</think>", 0.0, 0.0),
        ("<think>Easy.</think><answer>Lyon</answer><answer>Paris</answer>", 1.0, 0.8),
        ("<think>Easy.</think><answer>Paris</answer>", 1.0, 1.0),
    ],
)
def test_search_r1_pays_for_the_last_answer_and_its_variant_for_the_form(
    completion: str, em: float, formatted: float
) -> None:
    assert search_r1(completion, GOLD, {}).value == em
    found = search_r1(completion, GOLD, {}, scores="format")
    assert found.value == pytest.approx(formatted)
    assert found.accuracy == em


@pytest.mark.parametrize(
    ("completion", "value", "accuracy"),
    [
        (r"<think>a</think><answer>It is \boxed{Paris}.</answer>", 1.0, 1.0),
        (r"<think>a</think><search>q</search><result>r</result><think>b</think><answer>\boxed{Paris France}</answer>", 2 / 3, 0.0),
        (r"<think>a</think><answer>\boxed{Lyon}</answer>", 0.1, 0.0),
        (r"<think>a</think><answer>Paris</answer>", 0.0, 0.0),
        (r"<answer>\boxed{Paris}</answer>", 0.0, 0.0),
        (r"<think>a</think><search>q</search><answer>\boxed{Paris}</answer>", 0.0, 0.0),
    ],
)  # fmt: skip
def test_research_pays_f1_in_the_right_form(completion: str, value: float, accuracy: float) -> None:
    found = research(completion, GOLD, {})
    assert (found.value, found.accuracy) == (pytest.approx(value), accuracy)


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('{"answer": ["Berlin", "the paris"]}', 1.0),
        ('{"answer": ["Paris"]}', 0.0),
        ('{"answer": ["Paris", "Berlin", "Rome"]}', 0.0),
        ('{"answer": "Paris, Berlin"}', 0.0),
        ('["Paris", "Berlin"]', 0.0),
        ('{"answer": [["Paris"], "Berlin"]}', 0.0),
        ("[" * 100_000, 0.0),
        ("Paris and Berlin", 0.0),
    ],
)
def test_table_r1_wants_exactly_the_expected_list(answer: str, value: float) -> None:
    assert table_r1(f"<think>a</think><answer>{answer}</answer>", ["Paris", "Berlin"], {}) == value


def test_numbers_count_with_and_without_commas() -> None:
    assert table_r1('<answer>{"answer": [115306]}</answer>', ["115,306"], {}) == 1.0
    assert search_r1("<answer>115306</answer>", ["115,306"], {}).value == 1.0


def test_a_part_of_the_answer_is_enough_for_sub_em() -> None:
    said = r"\boxed{It is New York City}"
    assert [qa(said, ["New York"], {}, metric=m) for m in ("em", "sub_em")] == [0.0, 1.0]
    assert qa(said, ["York New"], {}, metric="sub_em") == 0.0


def test_nested_tags_open_tags_and_words_between_are_no_sections() -> None:
    assert sections("<think>a</think>\n<answer>b</answer>") == [("think", "a"), ("answer", "b")]
    for text in ("<think><answer>b</answer></think>", "<think>a", "<think>a</think> so <answer>b</answer>", "</think>"):
        assert sections(text) is None
