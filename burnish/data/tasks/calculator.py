"""Arithmetic with a calculator: the smallest task in which a model learns to use a tool. `347*286=` asks for the value.

A call of the tool stands in square brackets, and its result comes back between `>` and `;`. The answer stands in parentheses:

    347*286=[347*286]>99242;(99242)

The environment `tags` calls the tool `calculator` (`recipes/calculator_toy.yaml`). A small model cannot multiply such numbers itself. It
can copy the problem into a call and the result into the answer. A hash of the problem decides the split.
"""

from __future__ import annotations

from typing import Any

from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.data.tasks.task import Dice, check_span, first_on_split

CALCULATOR = "calculator"
SIGNS = "+-*"
DIGITS = "0123456789"


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 if the last text in parentheses is the value, else 0."""
    before, closed, _ = completion.rpartition(")")
    _, opened, written = before.rpartition("(")
    return float(bool(closed) and bool(opened) and written == answer)


class CalculatorTask:
    """Two numbers of `min_digits` to `max_digits` digits, and one of the `signs` between them."""

    name = CALCULATOR
    alphabet = "".join(map(chr, range(32, 127)))  # the tool answers a wrong call with an error text
    score = staticmethod(score)

    def __init__(self, seed: int, min_digits: int = 2, max_digits: int = 3, signs: str = SIGNS) -> None:
        check_span(CALCULATOR, "digits", min_digits, max_digits, least=1, most=6)
        if not isinstance(signs, str) or not signs or not set(signs) <= set(SIGNS):
            raise UserError(f"{CALCULATOR}: signs should be some of {' '.join(SIGNS)}, got {signs!r}")
        self.seed, self.min_digits, self.max_digits, self.signs = seed, min_digits, max_digits, signs

    def row(self, split: str, index: int) -> Row:
        """The index-th problem of a split; extra["length"] is the number of digits of the longer number."""
        problem, value, length = self._problem(split, self.seed, CALCULATOR, split, index)
        extra = {"task": CALCULATOR, "length": length}
        return Row(f"{CALCULATOR}/{split}/{index}", f"{problem}=", CALCULATOR, value, extra)

    def demonstrations(
        self, num: int = 2000, seed: int = 0, calls: float = 0.3, slips: float = 0.3
    ) -> list[dict[str, Any]]:
        """What a poor student does with problems of the train split. Every answer is a row, with the text before it as the prompt.

        A share `calls` calls the calculator. The others guess, with the right number of digits. Of the texts that are copied into a
        call or an answer, a share `slips` has one wrong digit.
        """
        for name, share in (("calls", calls), ("slips", slips)):
            if not 0 <= share <= 1:
                raise UserError(f"{CALCULATOR}: {name} should be a share from 0 to 1, got {share!r}")
        rows = []
        for index in range(num):
            problem, value, _ = self._problem("train", seed, CALCULATOR, "demonstrations", index)
            dice = Dice(seed, CALCULATOR, "student", index)
            if dice.unit() >= calls:
                guess = "".join(c if c == "-" else DIGITS[dice.between(0, 9)] for c in value)
                rows.append({"prompt": f"{problem}=", "completion": f"({guess})"})
                continue
            call = f"[{_copied(problem, slips, dice)}]"
            rows.append({"prompt": f"{problem}=", "completion": call})
            rows.append({"prompt": f"{problem}={call}>{value};", "completion": f"({_copied(value, slips, dice)})"})
        return rows

    def _problem(self, split: str, *key: int | str) -> tuple[str, str, int]:
        """A problem, its value and the number of digits of its longer number."""

        def propose(attempt: int) -> tuple[str, tuple[str, str, int]]:
            dice = Dice(*key, attempt)
            a, b = self._number(dice), self._number(dice)
            sign = self.signs[dice.between(0, len(self.signs) - 1)]
            value = a + b if sign == "+" else a - b if sign == "-" else a * b
            problem = f"{a}{sign}{b}"
            return f"{CALCULATOR} {problem}", (problem, str(value), len(str(max(a, b))))

        return first_on_split(split, propose, CALCULATOR)

    def _number(self, dice: Dice) -> int:
        length = dice.between(self.min_digits, self.max_digits)
        return int("".join(DIGITS[dice.between(1 if place == 0 and length > 1 else 0, 9)] for place in range(length)))


def _copied(text: str, slips: float, dice: Dice) -> str:
    """The text, with one wrong digit in a share of cases."""
    places = [place for place, c in enumerate(text) if c in DIGITS]
    if dice.unit() >= slips:
        return text
    place = places[dice.between(0, len(places) - 1)]
    wrong = DIGITS[(int(text[place]) + dice.between(1, 9)) % 10]
    return text[:place] + wrong + text[place + 1 :]
