"""Guess a number: the smallest task with several turns. `17-23?` is answered by a guess, which is answered by `21-23?`, and so on.

Each wrong guess is answered by the range that is still possible, so a guess is judged by where it leads. Halving always finds one of 7
numbers in three guesses; guessing at random in the remaining range finds it in two games of three. The environment `guess_number`
(`burnish/environments/`) plays the other side. A hash of the range decides the split. If single numbers of a range were in the test split,
a player would learn never to guess them.
"""

from __future__ import annotations

from typing import Any

from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.data.tasks.task import Dice, first_on_split

GUESS_NUMBER = "guess_number"
MAX_NUMBERS = 100  # numbers have two digits
SAME_FIRST_DIGIT = 10  # ranges of up to this many numbers share the first digit


def narrow_range(low: int, high: int, guess: int, secret: int) -> tuple[int, int]:
    """The range that is still possible after a wrong guess; a guess outside of it changes nothing."""
    return (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))


def guess_question(low: int, high: int, words: bool, is_first: bool) -> str:
    """The question to the model when the number is known to be from `low` to `high`."""
    if not words:
        return f"{low:02}-{high:02}?"
    if not is_first:
        return f"No. It is from {low} to {high}."
    return (
        f"I am thinking of a whole number from {low} to {high}. Guess it: answer with one number and nothing else. After every wrong "
        "guess I tell you what is still possible."
    )


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """Raise a UserError: a text alone cannot be scored, because the environment gives the rewards."""
    raise UserError(
        f"task {GUESS_NUMBER} has no checker of texts: set environment={GUESS_NUMBER}, which gives the rewards"
    )


class GuessNumberTask:
    """Guess one of `numbers` consecutive numbers below a hundred. With `words` the questions are in English."""

    name = GUESS_NUMBER
    score = staticmethod(score)

    def __init__(self, seed: int, numbers: int = 7, words: bool = False) -> None:
        if isinstance(numbers, bool) or not isinstance(numbers, int) or not 2 <= numbers <= MAX_NUMBERS:
            raise UserError(
                f"{GUESS_NUMBER}: numbers should be a whole number from 2 to {MAX_NUMBERS}, got {numbers!r}"
            )
        self.seed, self.numbers, self.words = seed, numbers, words

    @property
    def alphabet(self) -> str | None:
        return None if self.words else "0123456789-?"

    def row(self, split: str, index: int) -> Row:
        """The index-th problem of a split."""
        low, secret = self._problem(split, self.seed, GUESS_NUMBER, split, index)
        high = low + self.numbers - 1
        extra = {"task": GUESS_NUMBER, "length": self.numbers, "low": low, "high": high, "words": self.words}
        return Row(
            f"{GUESS_NUMBER}/{split}/{index}", guess_question(low, high, self.words, True), GUESS_NUMBER, secret, extra
        )

    def demonstrations(
        self, num: int = 2000, seed: int = 0, guesses: int = 3, forgetful: float = 0.5
    ) -> list[dict[str, Any]]:
        """Dialogues of a weak player from the train split, with at most `guesses` guesses.

        A guess is uniform in the range that is still possible; a fraction `forgetful` of them is uniform in the first range.
        """
        if not 0 <= forgetful <= 1:
            raise UserError(f"{GUESS_NUMBER}: forgetful should be a share from 0 to 1, got {forgetful!r}")
        rows = []
        for index in range(num):
            low, secret = self._problem("train", seed, GUESS_NUMBER, "demonstrations", index)
            high, dice = low + self.numbers - 1, Dice(seed, GUESS_NUMBER, "guesses", index)
            first = low, high
            prompt, turns = guess_question(low, high, self.words, True), list[dict[str, str]]()
            for k in range(guesses):
                guess = dice.between(*(first if dice.unit() < forgetful else (low, high)))
                turns.append({"role": "assistant", "content": str(guess) if self.words else f"{guess:02}"})
                if guess == secret or k == guesses - 1:
                    break
                low, high = narrow_range(low, high, guess, secret)
                turns.append({"role": "user", "content": guess_question(low, high, self.words, False)})
            rows.append({"prompt": prompt, "completion": turns})
        return rows

    def _problem(self, split: str, *key: int | str) -> tuple[int, int]:
        """The lowest number of the range, and the number to guess."""

        def propose(attempt: int) -> tuple[str, tuple[int, int]]:
            dice = Dice(*key, attempt)
            if self.numbers <= SAME_FIRST_DIGIT:
                low = SAME_FIRST_DIGIT * dice.between(0, MAX_NUMBERS // SAME_FIRST_DIGIT - 1) + dice.between(
                    0, SAME_FIRST_DIGIT - self.numbers
                )
            else:
                low = dice.between(0, MAX_NUMBERS - self.numbers)
            return f"{GUESS_NUMBER} {low} {self.numbers}", (low, low + dice.between(0, self.numbers - 1))

        return first_on_split(split, propose, GUESS_NUMBER)
