"""Reading a drawn bar chart: `B?` asks for the height of the bar with that letter, a number from 0 to 9.

A chart has `min_bars` to `max_bars` bars in colours of their own, letters below them, and lines at 0, 5 and 10. A hash of the heights
decides the split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.data.drawing import BLACK, COLOURS, GLYPH_HEIGHT, GLYPH_WIDTH, canvas, draw_text, fill_rectangle
from burnish.data.row import Message, Row
from burnish.data.tasks.picture_task import PRINTABLE, check_side, picture_prompt
from burnish.data.tasks.task import Dice, check_span, final_answer, first_on_split

if TYPE_CHECKING:
    import numpy as np

READ_CHART = "read_chart"
LETTERS = "ABCDEF"
TOP = 10
"""The height of the chart; bars are lower."""
LINES = (0, 5, 10)


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 for exactly the number, in `<answer>` tags or alone; else 0."""
    return float(final_answer(completion) == answer)


def draw_chart(heights: tuple[int, ...], side: int, dice: Dice) -> np.ndarray:
    """Draw a chart; the dice choose the colours."""
    image = canvas(side, side)
    left, base = 2 * GLYPH_WIDTH + 5, side - GLYPH_HEIGHT - 3
    unit = (base - 3) / TOP
    for line in LINES:
        y = round(base - line * unit)
        fill_rectangle(image, left, y - 1, side, y, (170, 170, 170))
        draw_text(image, left - 1 - 4 * len(str(line)), min(max(y - 3, 0), base), str(line), BLACK)
    colours = list(COLOURS.values())
    width = (side - left) / len(heights)
    for place, height in enumerate(heights):
        x = left + place * width
        colour = colours.pop(dice.between(0, len(colours) - 1))
        fill_rectangle(image, x + 0.15 * width, base - height * unit, x + 0.85 * width, base, colour)
        draw_text(image, round(x + width / 2) - 1, base + 2, LETTERS[place], BLACK)
    return image


class ReadChart:
    """Charts of `min_bars` to `max_bars` bars, `side` pixels wide."""

    name = READ_CHART
    alphabet = LETTERS + "0123456789?"
    score = staticmethod(score)

    def __init__(self, seed: int, min_bars: int = 2, max_bars: int = 5, side: int = 64, words: bool = False) -> None:
        check_span(READ_CHART, "bars", min_bars, max_bars, least=1, most=len(LETTERS))
        check_side(READ_CHART, side)
        self.seed, self.min_bars, self.max_bars, self.side, self.words = seed, min_bars, max_bars, side, words
        if words:
            self.alphabet = PRINTABLE

    def row(self, split: str, index: int) -> Row:
        """The index-th chart of a split; extra["length"] is the number of its bars."""
        key = (self.seed, READ_CHART, split, index)
        heights, asked = self._chart(split, *key)
        extra = {"task": READ_CHART, "length": len(heights)}
        prompt = self._prompt(heights, asked, *key)
        return Row(f"{READ_CHART}/{split}/{index}", prompt, READ_CHART, str(heights[asked]), extra)

    def demonstrations(self, num: int = 2000, seed: int = 0, right: float = 0.4) -> list[dict[str, Any]]:
        """What a careless reader says about charts of the train split: a share `right` is right, the others are one off."""
        if not 0 < right <= 1:
            raise UserError(f"{READ_CHART}: right should be a share above 0 and up to 1, got {right!r}")
        rows = []
        for index in range(num):
            key = (seed, READ_CHART, "demonstrations", index)
            heights, asked = self._chart("train", *key)
            dice = Dice(*key, "reader")
            off = 0 if dice.unit() < right else 1 if dice.unit() < 0.5 else -1
            said = heights[asked] + off
            rows.append({"prompt": self._prompt(heights, asked, *key), "completion": str(min(max(said, 0), TOP - 1))})
        return rows

    def _prompt(self, heights: tuple[int, ...], asked: int, *key: int | str) -> list[Message]:
        image = draw_chart(heights, self.side, Dice(*key, "drawing"))
        letter = LETTERS[asked]
        words = f"How high is bar {letter} of the chart? Answer with a whole number in <answer> tags."
        return picture_prompt(image, words if self.words else f"{letter}?")

    def _chart(self, split: str, *key: int | str) -> tuple[tuple[int, ...], int]:
        number = Dice(*key).between(self.min_bars, self.max_bars)

        def propose(attempt: int) -> tuple[str, tuple[tuple[int, ...], int]]:
            dice = Dice(*key, attempt)
            heights = tuple(dice.between(0, TOP - 1) for _ in range(number))
            asked = dice.between(0, number - 1)
            return f"{READ_CHART} {heights} {asked}", (heights, asked)

        return first_on_split(split, propose, READ_CHART)
