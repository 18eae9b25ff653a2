"""Addition: `17+5=` is answered by `22`. Held out iff a hash of the unordered pair says so.

A model that talks is asked in words (`prompt`), and its answer is read by the reward `number`.
"""

from __future__ import annotations

from typing import Any

from burnish.config.errors import UserError
from burnish.data.rows import Row
from burnish.data.tasks.base import Dice, check_span, first_on_side

NAME = "addition"


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 for exactly the sum in digits (spaces around it do not matter), else 0."""
    return float(completion.strip() == answer)


class Addition:
    """Two numbers of `min_digits` to `max_digits` digits, every pair of lengths equally often, asked for by `prompt`."""

    name = NAME
    alphabet = "0123456789+="
    score = staticmethod(score)

    def __init__(self, seed: int, min_digits: int = 1, max_digits: int = 3, prompt: str = "{a}+{b}=") -> None:
        check_span(NAME, "digits", min_digits, max_digits, least=1, most=64)
        if "{a}" not in prompt or "{b}" not in prompt:
            raise UserError(f"task {NAME}: the prompt {prompt!r} must say {{a}} and {{b}}, where the two numbers go")
        self.seed, self.min_digits, self.max_digits, self.prompt = seed, min_digits, max_digits, prompt

    def row(self, split: str, index: int) -> Row:
        """The index-th problem of a split; extra["length"] is the digits of the longer number."""

        def propose(attempt: int) -> tuple[str, tuple[int, int]]:
            dice = Dice(self.seed, NAME, split, index, attempt)
            a, b = self._number(dice), self._number(dice)
            return f"{NAME} {min(a, b)} {max(a, b)}", (a, b)

        a, b = first_on_side(split, propose, NAME)
        extra = {"task": NAME, "length": len(str(max(a, b)))}
        asked = self.prompt.replace("{a}", str(a)).replace("{b}", str(b))
        return Row(f"{NAME}/{split}/{index}", asked, NAME, str(a + b), extra)

    def _number(self, dice: Dice) -> int:
        length = dice.between(self.min_digits, self.max_digits)
        first = dice.between(0 if length == 1 else 1, 9)
        return int("".join(str(d) for d in [first, *(dice.between(0, 9) for _ in range(length - 1))]))
