"""Clicking on a drawn screen: `red circle` asks for a point inside the button with that icon. The reward is GUI-R1's.

A screen has a bar with a title and `buttons` buttons, each with an icon of its own. The answer is a point in pixels, `12,34`, or with `words`
an action in GUI-R1's form (`burnish/data/gui_actions.py`). A hash of icons and places decides the split.

Demonstrations look before they click: `ArcBgsCbtDyxB=12,34` names every cell in reading order and what is in it (the first letter of the colour,
then of the icon, `x` for a cross), then the cell to click on. Only the point behind the last `=` is scored; with `words` the cells stand in the thoughts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.config.errors import UserError
from burnish.data.drawing import COLOURS, WHITE, canvas, draw_frame, draw_text, fill_rectangle, fill_shape
from burnish.data.gui_actions import gui_reward, read_target, write_click
from burnish.data.row import Message, Row
from burnish.data.tasks.picture_task import CELLS, EMPTY, PRINTABLE, RESULT, check_side, picture_prompt
from burnish.data.tasks.task import Dice, first_on_split

if TYPE_CHECKING:
    import numpy as np

CLICK_TARGET = "click_target"
ICONS = {"circle": "c", "square": "s", "triangle": "t", "cross": "x"}
"""Icons, each with its letter in demonstrations."""
TINTS = ("red", "green", "blue", "yellow")
MOST_GRID = 3


class Button(NamedTuple):
    """A button: its cell, and its icon."""

    cell: int
    icon: str
    tint: str

    @property
    def label(self) -> str:
        return f"{self.tint} {self.icon}"

    @property
    def note(self) -> str:
        """Its colour and icon as two letters."""
        return self.tint[0] + ICONS[self.icon]


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """GUI-R1's reward: 0.8 for a point inside the box, 0.2 for the form. What stands before a `=` are notes, unless `words` are asked for."""
    if extra["words"]:
        return gui_reward(completion, read_target(answer))
    return gui_reward(completion.rpartition(RESULT)[2], read_target(answer), bare=True)


def button_box(cell: int, grid: int, side: int) -> tuple[int, int, int, int]:
    """The box of the button of a cell, in pixels: left, top, right, bottom. Cells are squares below a bar that is as high as one."""
    row, column = divmod(cell, grid)
    size = side / grid
    left, top, right, bottom = column + 0.08, row + 1.08, column + 0.92, row + 1.92
    return round(left * size), round(top * size), round(right * size), round(bottom * size)


def draw_screen(buttons: tuple[Button, ...], grid: int, side: int) -> np.ndarray:
    """Draw a screen with its bar and buttons."""
    bar = round(side / grid)
    image = canvas(side + bar, side, (250, 250, 252))
    fill_rectangle(image, 0, 0, side, bar, (60, 66, 82))
    draw_text(image, 2, max(bar // 2 - 2, 0), "MENU", WHITE)
    for button in buttons:
        left, top, right, bottom = button_box(button.cell, grid, side)
        fill_rectangle(image, left, top, right, bottom, (222, 226, 234))
        draw_frame(image, left, top, right, bottom, (120, 126, 140))
        radius = 0.42 * min(right - left, bottom - top)
        fill_shape(image, button.icon, (left + right) / 2, (top + bottom) / 2, radius, COLOURS[button.tint])
    return image


class ClickTarget:
    """Screens of `side` pixels' width with `buttons` buttons in `grid` columns and rows, below a bar."""

    name = CLICK_TARGET
    alphabet = "".join(
        sorted(set("".join((*ICONS, *ICONS.values(), *TINTS)) + "0123456789 ," + CELLS + EMPTY + RESULT))
    )
    score = staticmethod(score)

    def __init__(self, seed: int, buttons: int = 4, grid: int = 3, side: int = 48, words: bool = False) -> None:
        if isinstance(grid, bool) or not isinstance(grid, int) or not 2 <= grid <= MOST_GRID:
            raise UserError(f"{CLICK_TARGET}: grid should be 2 or {MOST_GRID}, got {grid!r}")
        if isinstance(buttons, bool) or not isinstance(buttons, int) or not 2 <= buttons <= grid**2:
            raise UserError(f"{CLICK_TARGET}: buttons should be a whole number from 2 to {grid**2}, got {buttons!r}")
        check_side(CLICK_TARGET, side)
        self.seed, self.num_buttons, self.grid, self.side, self.words = seed, buttons, grid, side, words
        if words:
            self.alphabet = PRINTABLE

    def row(self, split: str, index: int) -> Row:
        """The index-th screen of a split."""
        buttons = self._buttons(split, self.seed, CLICK_TARGET, split, index)
        answer = {
            "action": "click",
            "gt_bbox": list(button_box(buttons[0].cell, self.grid, self.side)),
            "input_text": "no input text",
        }
        extra = {"task": CLICK_TARGET, "length": self.num_buttons, "words": self.words}
        return Row(f"{CLICK_TARGET}/{split}/{index}", self._prompt(buttons), CLICK_TARGET, answer, extra)

    def demonstrations(self, num: int = 2000, seed: int = 0, right: float = 0.4) -> list[dict[str, Any]]:
        """Clicks of a hasty user on screens of the train split.

        A share `right` of them hits the button that is asked for. The others hit the first button in reading order, whatever is asked for.
        """
        if not 0 < right <= 1:
            raise UserError(f"{CLICK_TARGET}: right should be a share above 0 and up to 1, got {right!r}")
        rows = []
        for index in range(num):
            buttons = self._buttons("train", seed, CLICK_TARGET, "demonstrations", index)
            dice = Dice(seed, CLICK_TARGET, "user", index)
            hit = buttons[0] if dice.unit() < right else min(buttons)
            left, top, right_, bottom = button_box(hit.cell, self.grid, self.side)
            x, y = dice.between(left + 2, right_ - 2), dice.between(top + 2, bottom - 2)
            notes = _notes(buttons, self.grid) + CELLS[hit.cell]
            said = write_click(x, y, notes) if self.words else f"{notes}{RESULT}{x},{y}"
            rows.append({"prompt": self._prompt(buttons), "completion": said})
        return rows

    def _prompt(self, buttons: tuple[Button, ...]) -> list[Message]:
        asked = buttons[0].label
        words = (
            f"Click on the {asked}. First think in <think> tags, then answer with the action in <answer> tags: "
            "[{'action': 'click', 'point': [x, y], 'input_text': 'no input text'}]"
        )
        shown = draw_screen(tuple(sorted(buttons)), self.grid, self.side)
        return picture_prompt(shown, words if self.words else asked)

    def _buttons(self, split: str, *key: int | str) -> tuple[Button, ...]:
        """Buttons in the order of their drawing; the first is asked for. All have different icons."""

        def propose(attempt: int) -> tuple[str, tuple[Button, ...]]:
            dice = Dice(*key, attempt)
            cells = list(range(self.grid**2))
            kinds = [(icon, tint) for icon in ICONS for tint in TINTS]
            buttons = []
            for _ in range(self.num_buttons):
                cell = cells.pop(dice.between(0, len(cells) - 1))
                buttons.append(Button(cell, *kinds.pop(dice.between(0, len(kinds) - 1))))
            return f"{CLICK_TARGET} {sorted(buttons)} {buttons[0].label}", tuple(buttons)

        return first_on_split(split, propose, CLICK_TARGET)


def _notes(buttons: tuple[Button, ...], grid: int) -> str:
    """The cells in reading order, each with what is in it."""
    seen = {button.cell: button.note for button in buttons}
    return "".join(name + seen.get(cell, EMPTY) for cell, name in enumerate(CELLS[: grid**2]))
