"""Clicking on a drawn screen: `red circle` asks for a point inside the button with that icon. The reward is GUI-R1's.

A screen has a bar with a title and `buttons` buttons, each with an icon of its own. The answer is a point in pixels: alone (`12,34`), or
with `words` in GUI-R1's form (`burnish/data/gui_actions.py`). A hash of icons and places decides the split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from burnish.config.errors import UserError
from burnish.data.drawing import COLOURS, WHITE, canvas, draw_frame, draw_text, fill_rectangle, fill_shape
from burnish.data.gui_actions import gui_reward, read_target, write_click
from burnish.data.row import Message, Row
from burnish.data.tasks.picture_task import PRINTABLE, check_side, picture_prompt
from burnish.data.tasks.task import Dice, first_on_split

CLICK_TARGET = "click_target"
ICONS = ("circle", "square", "triangle", "cross")
TINTS = ("red", "green", "blue", "yellow")
BAR = 0.14
"""Height of the bar, as a share of the screen."""
GRID = 3
"""Buttons stand in cells of a grid of this side below the bar."""


class Button(NamedTuple):
    """A button: its cell, and its icon."""

    cell: int
    icon: str
    tint: str

    @property
    def label(self) -> str:
        return f"{self.tint} {self.icon}"


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """GUI-R1's reward: 0.8 for a point inside the box, 0.2 for the form."""
    return gui_reward(completion, read_target(answer), bare=not extra["words"])


def button_box(cell: int, side: int) -> tuple[int, int, int, int]:
    """The box of the button of a cell, in pixels: left, top, right, bottom."""
    row, column = divmod(cell, GRID)
    top, height, width = round(side * BAR), side * (1 - BAR) / GRID, side / GRID
    left, upper = round(column * width + 0.08 * width), round(top + row * height + 0.08 * height)
    return left, upper, round((column + 1) * width - 0.08 * width), round(top + (row + 1) * height - 0.08 * height)


def draw_screen(buttons: tuple[Button, ...], side: int) -> np.ndarray:
    """Draw a screen with its bar and buttons."""
    image = canvas(side, side, (250, 250, 252))
    fill_rectangle(image, 0, 0, side, round(side * BAR), (60, 66, 82))
    draw_text(image, 2, max(round(side * BAR / 2) - 2, 0), "MENU", WHITE)
    for button in buttons:
        left, top, right, bottom = button_box(button.cell, side)
        fill_rectangle(image, left, top, right, bottom, (222, 226, 234))
        draw_frame(image, left, top, right, bottom, (120, 126, 140))
        radius = 0.32 * min(right - left, bottom - top)
        fill_shape(image, button.icon, (left + right) / 2, (top + bottom) / 2, radius, COLOURS[button.tint])
    return image


class ClickTarget:
    """Screens of `side` pixels with `buttons` buttons."""

    name = CLICK_TARGET
    alphabet = "".join(sorted(set("".join((*ICONS, *TINTS)) + "0123456789 ,")))
    score = staticmethod(score)

    def __init__(self, seed: int, buttons: int = 4, side: int = 64, words: bool = False) -> None:
        if isinstance(buttons, bool) or not isinstance(buttons, int) or not 2 <= buttons <= GRID**2:
            raise UserError(f"{CLICK_TARGET}: buttons should be a whole number from 2 to {GRID**2}, got {buttons!r}")
        check_side(CLICK_TARGET, side)
        self.seed, self.num_buttons, self.side, self.words = seed, buttons, side, words
        if words:
            self.alphabet = PRINTABLE

    def row(self, split: str, index: int) -> Row:
        """The index-th screen of a split."""
        buttons = self._buttons(split, self.seed, CLICK_TARGET, split, index)
        answer = {
            "action": "click",
            "gt_bbox": list(button_box(buttons[0].cell, self.side)),
            "input_text": "no input text",
        }
        extra = {"task": CLICK_TARGET, "length": self.num_buttons, "words": self.words}
        return Row(f"{CLICK_TARGET}/{split}/{index}", self._prompt(buttons), CLICK_TARGET, answer, extra)

    def demonstrations(self, num: int = 2000, seed: int = 0, right: float = 0.4) -> list[dict[str, Any]]:
        """Clicks of an inattentive user on screens of the train split: a share `right` hits the button, the others hit another one."""
        if not 0 < right <= 1:
            raise UserError(f"{CLICK_TARGET}: right should be a share above 0 and up to 1, got {right!r}")
        rows = []
        for index in range(num):
            buttons = self._buttons("train", seed, CLICK_TARGET, "demonstrations", index)
            dice = Dice(seed, CLICK_TARGET, "user", index)
            hit = buttons[0] if dice.unit() < right else buttons[dice.between(1, len(buttons) - 1)]
            left, top, right_, bottom = button_box(hit.cell, self.side)
            x, y = dice.between(left + 2, right_ - 2), dice.between(top + 2, bottom - 2)
            rows.append(
                {"prompt": self._prompt(buttons), "completion": write_click(x, y) if self.words else f"{x},{y}"}
            )
        return rows

    def _prompt(self, buttons: tuple[Button, ...]) -> list[Message]:
        asked = buttons[0].label
        words = (
            f"Click on the {asked}. First think in <think> tags, then answer with the action in <answer> tags: "
            "[{'action': 'click', 'point': [x, y], 'input_text': 'no input text'}]"
        )
        shown = draw_screen(tuple(sorted(buttons)), self.side)
        return picture_prompt(shown, words if self.words else asked)

    def _buttons(self, split: str, *key: int | str) -> tuple[Button, ...]:
        """Buttons in the order of their drawing; the first is asked for. All have different icons."""

        def propose(attempt: int) -> tuple[str, tuple[Button, ...]]:
            dice = Dice(*key, attempt)
            cells = list(range(GRID**2))
            kinds = [(icon, tint) for icon in ICONS for tint in TINTS]
            buttons = []
            for _ in range(self.num_buttons):
                cell = cells.pop(dice.between(0, len(cells) - 1))
                buttons.append(Button(cell, *kinds.pop(dice.between(0, len(kinds) - 1))))
            return f"{CLICK_TARGET} {sorted(buttons)} {buttons[0].label}", tuple(buttons)

        return first_on_split(split, propose, CLICK_TARGET)
