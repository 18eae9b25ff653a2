"""Which of two answers is better, for a small judge made from nothing (RM-R1, 2505.02387): a string of digits and two answers, one of them sorted.

    prompt       507508>005578:A 005587:B?
    completion   005578:A<answer>[[A]]</answer>        the reasons are the judge's own solution, and whose it is

The letter follows the answer, so that a small model can look its own solution up.

Rows 2i and 2i+1 are the two orders of one pair, so a judge that prefers a position is right in one of them. The wrong answers have all the kinds of
errors that sorting digits can have. Pairs of the train split are of digits that sort_digits trains on; `preferences` gives the same
kind of pairs to a Bradley-Terry reward model.
"""

from __future__ import annotations

from typing import Any

from burnish.config.errors import UserError
from burnish.data.pair_questions import VERDICT_TAGS, verdict_of
from burnish.data.row import Row
from burnish.data.tasks.sort_digits import SortDigits
from burnish.data.tasks.task import Dice, check_span

PAIR_VERDICT = "pair_verdict"
DIGITS = "0123456789"


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 for the verdict of the better answer alone in the last 80 characters, else -1."""
    return 1.0 if verdict_of(completion) == answer else -1.0


class PairVerdict:
    """Pairs of answers to strings of `min_digits` to `max_digits` digits."""

    name = PAIR_VERDICT
    alphabet = "".join(dict.fromkeys(DIGITS + ">A:B ?" + VERDICT_TAGS["A"]))
    score = staticmethod(score)

    def __init__(self, seed: int, min_digits: int = 4, max_digits: int = 6) -> None:
        check_span(PAIR_VERDICT, "digits", min_digits, max_digits, least=2, most=12)
        self.seed = seed
        self._sorting = SortDigits(seed, min_digits, max_digits)

    def row(self, split: str, index: int) -> Row:
        """The index-th question of a split: pair index // 2, the sorted answer first if index is even."""
        digits, right, wrong = self._pair(split, self.seed, PAIR_VERDICT, split, index // 2)
        letter = "AB"[index % 2]
        extra = {"task": PAIR_VERDICT, "length": len(digits), "pair": index // 2}
        return Row(
            f"{PAIR_VERDICT}/{split}/{index}", _question(digits, right, wrong, letter), PAIR_VERDICT, letter, extra
        )

    def demonstrations(self, num: int = 2000, seed: int = 0, flawed: float = 0.5) -> list[dict[str, str]]:
        """Verdicts on pairs of the train split, each in one order. A share `flawed` sorts wrongly and then names A or B at random."""
        if not 0 <= flawed <= 1:
            raise UserError(f"{PAIR_VERDICT}: flawed should be a share from 0 to 1, got {flawed!r}")
        rows = []
        for index in range(num):
            digits, right, wrong = self._pair("train", seed, PAIR_VERDICT, "demonstrations", index)
            dice = Dice(seed, PAIR_VERDICT, "student", index)
            letter = "AB"[dice.between(0, 1)]
            solution, verdict = right, letter
            if dice.unit() < flawed:
                solution, verdict = spoilt_answer(dice, digits, right), "AB"[dice.between(0, 1)]
            question = _question(digits, right, wrong, letter)
            rows.append({"prompt": question, "completion": f"{solution}:{verdict}{VERDICT_TAGS[verdict]}"})
        return rows

    def preferences(self, num: int = 2000, seed: int = 0, split: str = "train") -> list[dict[str, str]]:
        """The pairs of the rows of a split, for a reward model: the digits, the sorted answer and the wrong one."""
        found = [self._pair(split, seed, PAIR_VERDICT, split, index) for index in range(num)]
        return [{"prompt": digits + ">", "chosen": right, "rejected": wrong} for digits, right, wrong in found]

    def _pair(self, split: str, *key: int | str) -> tuple[str, str, str]:
        """Digits, the sorted answer and a wrong one."""
        attempt = 0
        while True:
            digits = self._sorting._digits(split, *key, attempt)
            right = "".join(sorted(digits))
            wrong = spoilt_answer(Dice(*key, "spoilt", attempt), digits, right)
            if wrong and wrong != right:
                return digits, right, wrong
            attempt += 1  # the spoilt answer happened to be right


def _question(digits: str, right: str, wrong: str, letter: str) -> str:
    first, second = (right, wrong) if letter == "A" else (wrong, right)
    return f"{digits}>{first}:A {second}:B?"


def spoilt_answer(dice: Dice, digits: str, right: str) -> str:
    """An answer with one of the errors that sorting digits can have. Sometimes it is still right."""
    at, other = dice.between(0, len(right) - 1), str(dice.between(0, 9))
    swap = min(at, len(right) - 2)
    choices = [
        digits,
        digits[: at + 1] + "".join(sorted(digits[at + 1 :])),
        "".join(sorted(digits[: at + 1])) + digits[at + 1 :],
        right[:swap] + right[swap + 1] + right[swap] + right[swap + 2 :],
        "".join(sorted(right[:at] + other + right[at + 1 :])),
        right[:at] + other + right[at + 1 :],
        right[:at] + right[at + 1 :],
        "".join(sorted(right + other)),
    ]
    return choices[dice.between(0, len(choices) - 1)]
