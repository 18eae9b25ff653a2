"""The environment of the task `guess_number`: after every wrong guess it states the remaining range.

A trajectory has reward 1 if it finds the number, otherwise 0. The state of a turn is the remaining range, so GiGPO compares guesses that were made
with the same knowledge.
"""

from __future__ import annotations

import re

from burnish.config.errors import UserError
from burnish.data.prompt_pool import Prompt
from burnish.data.tasks.guess_number import GUESS_NUMBER, guess_question, narrow_range
from burnish.environments.base import Done, Turn
from burnish.environments.token_dialogue import Dialogue
from burnish.models.tokenizer import Tokenizer


class GuessNumber:
    """The model guesses a number, and is told the range that is still possible.

    The guess is the last number of a completion. After a completion without a number the range stays the same.
    """

    gives_rewards = True
    correct_at = 1.0

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        row = prompt.row
        if row.extra.get("task") != GUESS_NUMBER:
            raise UserError(
                f"environment {GUESS_NUMBER}: row {row.id} has no number to guess; expected a row of the task {GUESS_NUMBER}"
            )
        self.prompt, self.dialogue = prompt, Dialogue(prompt, tokenizer)
        self.secret: int = row.answer
        self.low, self.high = row.extra["low"], row.extra["high"]
        self.words: bool = row.extra["words"]
        """Whether questions are English sentences, instead of the range alone."""

    def start(self) -> Turn:
        return Turn(tuple(self.prompt.tokens), self._state)

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        guess = _last_number(text)
        if guess == self.secret:
            return Done(1.0)
        if guess is not None:
            self.low, self.high = narrow_range(self.low, self.high, guess, self.secret)
        question = guess_question(self.low, self.high, self.words, is_first=False)
        return Turn(self.dialogue.reply(completion, question), self._state)

    @property
    def _state(self) -> str:
        return f"{self.low}-{self.high}"


def _last_number(text: str) -> int | None:
    """Return the last number of a text; None if there is none or it has more than four digits."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found and len(found[-1]) <= 4 else None
