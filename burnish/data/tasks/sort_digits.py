"""The default task: sort a string of digits. `507508>` is answered by `005578`.

It is small enough for a two-layer model on two CPU cores. A model that has seen only flawed demonstrations can learn it from the reward
alone. A hash of the sorted digits decides the split, so every permutation of the same digits, with their common answer, is in one split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.data.tasks.task import Dice, check_span, first_on_split

SORT_DIGITS = "sort_digits"
FLAWED_ACCURACY = {4: 0.8, 5: 0.6, 6: 0.4, 7: 0.2}
"""Probability that a flawed demonstration is right, by number of digits. A wrong one copies its input."""


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 for exactly the sorted digits, ignoring spaces around them; else 0."""
    return float(completion.strip() == answer)


class SortDigits:
    """Strings of `min_digits` to `max_digits` digits, every length equally often."""

    name = SORT_DIGITS
    alphabet = "0123456789>"
    score = staticmethod(score)

    def __init__(self, seed: int, min_digits: int = 4, max_digits: int = 7) -> None:
        check_span(SORT_DIGITS, "digits", min_digits, max_digits, least=2, most=64)
        self.seed, self.min_digits, self.max_digits = seed, min_digits, max_digits

    def row(self, split: str, index: int) -> Row:
        """The index-th problem of a split."""
        digits = self._digits(split, self.seed, SORT_DIGITS, split, index)
        extra = {"task": SORT_DIGITS, "length": len(digits)}
        return Row(f"{SORT_DIGITS}/{split}/{index}", digits + ">", SORT_DIGITS, "".join(sorted(digits)), extra)

    def demonstrations(
        self,
        num: int = 2000,
        seed: int = 0,
        clean: bool = False,
        verified: bool = False,
        right: Mapping[int | str, float] | None = None,
    ) -> list[dict[str, str]]:
        """Supervised rows from the train split.

        `right` gives the probability of a right answer by number of digits; `clean` makes all right. `verified` discards wrong ones and
        draws until there are `num`.
        """
        chances = self._chances(clean, right)
        rows: list[dict[str, str]] = []
        index = 0
        while len(rows) < num:
            digits = self._digits("train", seed, SORT_DIGITS, "demonstrations", index)
            answer = "".join(sorted(digits))
            is_right = Dice(seed, SORT_DIGITS, "right", index).unit() < chances[len(digits)]
            completion = answer if is_right else digits
            if completion == answer or not verified:
                rows.append({"prompt": digits + ">", "completion": completion})
            index += 1
        return rows

    def preferences(self, num: int = 2000, seed: int = 0, split: str = "train") -> list[dict[str, str]]:
        """Pairs from one split: the right answer, and one that the checker rejects.

        Half of the rejected answers copy their input, as flawed demonstrations do. The others are sorted except for two neighbours. Digits
        that are all equal or already sorted have no such answer and are skipped.
        """
        rows: list[dict[str, str]] = []
        index = 0
        while len(rows) < num:
            digits = self._digits(split, seed, SORT_DIGITS, "preferences", split, index)
            answer = "".join(sorted(digits))
            dice = Dice(seed, SORT_DIGITS, "rejected", split, index)
            index += 1
            steps = [i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]]
            if not steps or digits == answer:
                continue
            i = steps[dice.between(0, len(steps) - 1)]
            swapped = answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]
            rejected = digits if dice.unit() < 0.5 else swapped
            rows.append({"prompt": digits + ">", "chosen": answer, "rejected": rejected})
        return rows

    def step_values(self, num: int = 2000, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
        """Answers of one split as steps of one digit each, with the value 1 while they are right and 0 from the first wrong one on.

        Half of the answers are right. The others take a wrong one of the digits that are left, at a random step, and sort the rest.
        """
        rows: list[dict[str, Any]] = []
        index = 0
        while len(rows) < num:
            digits = self._digits(split, seed, SORT_DIGITS, "step_values", split, index)
            dice = Dice(seed, SORT_DIGITS, "wrong step", split, index)
            index += 1
            answer = sorted(digits)
            places = [i for i in range(len(answer) - 1) if answer[i] != answer[-1]]
            if not places:
                continue
            wrong = len(answer)
            if dice.unit() < 0.5:
                wrong = places[dice.between(0, len(places) - 1)]
                larger = [i for i in range(wrong, len(answer)) if answer[i] != answer[wrong]]
                answer.insert(wrong, answer.pop(larger[dice.between(0, len(larger) - 1)]))
            values = [float(i < wrong) for i in range(len(answer))]
            rows.append({"prompt": digits + ">", "steps": answer, "values": values})
        return rows

    def _digits(self, split: str, *key: int | str) -> str:
        # The length is drawn before the split is checked, so that lengths are equally frequent in both splits.
        length = Dice(*key).between(self.min_digits, self.max_digits)

        def propose(attempt: int) -> tuple[str, str]:
            dice = Dice(*key, attempt)
            digits = "".join(str(dice.between(0, 9)) for _ in range(length))
            return f"{SORT_DIGITS} {''.join(sorted(digits))}", digits

        return first_on_split(split, propose, SORT_DIGITS)

    def _chances(self, clean: bool, right: Mapping[int | str, float] | None) -> dict[int, float]:
        lengths = range(self.min_digits, self.max_digits + 1)
        if clean:
            if right is not None:
                raise UserError(f"{SORT_DIGITS}: clean demonstrations are always right; give either clean or right")
            return dict.fromkeys(lengths, 1.0)
        # Keys of a YAML file are texts.
        chances = FLAWED_ACCURACY if right is None else {int(n): c for n, c in right.items() if str(n).isdigit()}
        missing = [str(n) for n in lengths if n not in chances]
        if missing:
            raise UserError(
                f"{SORT_DIGITS}: `right` does not say how often demonstrations of {', '.join(missing)} digits are right; "
                "give right: {'digits': chance} for every length, or clean: true"
            )
        if max(chances[n] for n in lengths) <= 0 or any(not 0 <= chances[n] <= 1 for n in lengths):
            raise UserError(f"{SORT_DIGITS}: `right` should hold chances between 0 and 1, not all zero; got {chances}")
        return chances
