"""GUI-R1's actions and their reward."""

from __future__ import annotations

import pytest

from burnish.config.errors import UserError
from burnish.data.gui_actions import Action, accuracy, gui_reward, read_action, read_target, word_f1, write_click

TARGET = {"action": "click", "gt_bbox": [10, 20, 30, 40], "input_text": "no input text"}


def form(action: str) -> str:
    return f"<think>I see it</think>\n<answer>{action}</answer>"


def test_a_click_is_read_as_it_was_written() -> None:
    assert read_action(write_click(12, 34.5, "there")) == Action("click", (12.0, 34.5), "no input text")
    assert gui_reward(write_click(12, 34), read_target(TARGET)) == pytest.approx(1.0)
    assert gui_reward(write_click(9, 34), read_target(TARGET)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "wrong",
    [
        "click at 12, 34",
        "<answer>[{'action': 'click', 'point': [12, 34]}]</answer>",
        form("click"),
        form("[]"),
        form("[{'point': [12, 34]}]"),
        form("[{'action': 7}]"),
        form("__import__('os').getpid()"),
        form("(" * 500),
    ],
)
def test_another_form_has_no_reward(wrong: str) -> None:
    assert read_action(wrong) is None
    assert gui_reward(wrong, read_target(TARGET)) == 0.0


def test_the_kind_of_the_action_and_its_text_must_be_right() -> None:
    typed = read_target({"gt_action": "type", "gt_bbox": [-100, -100], "gt_input_text": "red shoes size nine"})
    assert accuracy(read_action(form("{'action': 'TYPE', 'input_text': 'Red shoes'}")), typed) == 1.0
    assert accuracy(read_action(form("{'action': 'type', 'input_text': 'shoes'}")), typed) == 0.0  # F1 0.4
    assert accuracy(read_action(form("{'action': 'click', 'point': [1, 1]}")), typed) == 0.0
    assert accuracy(Action("press_back", None, ""), read_target({"action": "press_back"})) == 1.0
    assert accuracy(Action("click", None, ""), read_target(TARGET)) == 0.0
    assert accuracy(read_action(form("[{'action': 'click', 'point': ['a', 2]}]")), read_target(TARGET)) == 0.0


def test_word_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    assert word_f1("a b c", "B c d e") == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert word_f1("", "a") == word_f1("a", "") == 0.0


def test_a_wrong_expected_action_is_an_error_of_the_data() -> None:
    for answer in (
        "click",
        {"gt_bbox": [1, 2, 3, 4]},
        {"action": "click", "gt_bbox": [1, 2, 3]},
        {"action": "click", "gt_bbox": "x"},
    ):
        with pytest.raises(UserError, match="row 7"):
            read_target(answer, "row 7")
