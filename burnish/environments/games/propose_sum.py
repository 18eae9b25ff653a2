"""A proposer writes a sum, and four solvers work it out: the smallest task with a proposer and solvers.

The row's seed decides what kind of sum is asked for: two to four numbers of one to three digits. All four solvers read the same sum, each
in a conversation of its own. A solver earns 1 for the right result. The proposer earns 1 - p, where p is the share of right results, but 0
if all or none are right (learnability of Absolute Zero, 2505.03335). So it earns most with sums that the solvers rarely get right.
A proposal of another form earns `invalid_reward`, and no solver has a turn.
"""

from __future__ import annotations

import re
from typing import Literal

from burnish.data.tasks.task import Dice
from burnish.environments.absolute_zero import learnability
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games.text_game import (
    Format,
    TextGame,
    check_number,
    format_sentence,
    read_answer,
    split_of,
    user_message,
    write_answer,
)

NUM_SOLVERS = 4
PROPOSER = "proposer"
SOLVERS = tuple(f"solver#{k}" for k in range(1, NUM_SOLVERS + 1))
INVALID_REWARD = -0.5
MIN_NUMBERS, MAX_NUMBERS, MAX_DIGITS = 2, 4, 3


class ProposeSum(TextGame):
    """The model proposes a sum, and works it out four times."""

    name = "propose_sum"
    roles = (PROPOSER, *SOLVERS)
    gives_success = False

    def __init__(
        self, format: Format = "answer_tag", words: bool = True, invalid_reward: float = INVALID_REWARD
    ) -> None:
        super().__init__(format, words)
        check_number(self.name, "invalid_reward", invalid_reward, -1, 0)
        self.invalid_reward = float(invalid_reward)

    async def start(self, episode: Episode) -> Observation:
        self._dice = Dice(self.name, split_of(episode), episode.seed)
        self.num_numbers = self._dice.between(MIN_NUMBERS, MAX_NUMBERS)
        self.num_digits = self._dice.between(1, MAX_DIGITS)
        self.sum = ""
        self.results: list[bool] = []
        return Observation(messages=(user_message(self._proposer_text()),), role=PROPOSER, state=self._kind())

    async def step(self, answer: Answer) -> Observation | End:
        read = read_answer(answer, self.format)
        if not self.sum:
            self.sum = (read or "").replace(" ", "")
            return self._ask_solver() if self.is_valid(self.sum) else self._finish(is_valid=False)
        self.results.append(read == str(self.right_result()))
        return self._ask_solver() if len(self.results) < NUM_SOLVERS else self._finish()

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return self._finish()

    def is_valid(self, text: str) -> bool:
        """Whether a proposal has the form that was asked for: no leading zeros, no other characters."""
        number = rf"[1-9][0-9]{{{self.num_digits - 1}}}"
        return re.fullmatch(rf"{number}(\+{number}){{{self.num_numbers - 1}}}", text) is not None

    def right_result(self) -> int:
        return sum(map(int, self.sum.split("+")))

    def _ask_solver(self) -> Observation:
        role = SOLVERS[len(self.results)]
        text = f"{self.sum}=?"
        if self.words:
            text = f"Work out {self.sum}. {format_sentence(self.format)}"
        return Observation(messages=(user_message(text),), role=role, state=self.sum)

    def _finish(self, is_valid: bool = True) -> End:
        right = [float(is_right) for is_right in self.results]
        accuracy = sum(right) / len(right) if right else 0.0
        rewards = dict.fromkeys(self.roles, 0.0) | dict(zip(SOLVERS, right, strict=False))
        rewards[PROPOSER] = learnability(accuracy) if is_valid else self.invalid_reward
        metrics = {"valid_proposals": float(is_valid)} | ({"solver_accuracy": accuracy} if right else {})
        return End(rewards=rewards, text=self.sum, metrics=metrics)

    def _kind(self) -> str:
        return "+".join(["?" * self.num_digits] * self.num_numbers)

    def _proposer_text(self) -> str:
        if not self.words:
            return self._kind()
        digits = "one digit" if self.num_digits == 1 else f"{self.num_digits} digits"
        return (
            f"Write a sum of {self.num_numbers} numbers with {digits} each, such as {self._example()}. Four pupils work it out. You earn "
            "most if few of them get it right, and nothing if none or all do. " + format_sentence(self.format)
        )

    def _example(self) -> str:
        return "+".join(str(k + 1) * self.num_digits for k in range(self.num_numbers))

    # Players.

    def _random_sum(self, dice: Dice) -> str:
        least = 10 ** (self.num_digits - 1)
        return "+".join(str(dice.between(least, 10 * least - 1)) for _ in range(self.num_numbers))

    def random_answer(self, dice: Dice) -> str:
        if not self.sum:
            return write_answer(self._random_sum(dice), self.format)
        return write_answer(str(max(0, self.right_result() + dice.between(-1, 1))), self.format)

    def best_answer(self) -> str:
        return write_answer(str(self.right_result()) if self.sum else self._random_sum(self._dice), self.format)
