"""Countdown with several tries: combine all the numbers, each once, to reach the target.

A wrong try is answered by the value it reached, and the model may try again. The reward comes at the end: 1 if the target was reached, 0.1 if
the last try used exactly the given numbers, otherwise 0. With `max_turns` 1 it is RAGEN's game (Wang et al., 2025, arXiv 2504.20073).

The rows are those of the data task `countdown`, or any rows with the columns `numbers` and `answer`. Tries are parsed against a whitelist
of four operators, and nothing in them is executed (`burnish.data.tasks.arithmetic.evaluate_expression`).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from burnish.config.errors import UserError
from burnish.data.tasks.arithmetic import evaluate_expression, random_expression
from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games.text_game import (
    Format,
    TextGame,
    check_number,
    check_whole,
    format_sentence,
    read_answer,
    user_message,
    write_answer,
)

MAX_DIGITS = 40
"""Longer values are not shown: a product of huge literals would fill the context."""


def solve(numbers: list[int], target: int) -> str | None:
    """An expression that uses each number once and equals the target, by trying all; None if there is none."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    found = _search(parts, Fraction(target), set())
    return found[1:-1] if found is not None and found.startswith("(") else found


def _search(parts: list[tuple[Fraction, str]], target: Fraction, failed: set[tuple[Fraction, ...]]) -> str | None:
    """Combine two of the parts in every way and go on with the rest. `failed` are the multisets of values without a solution."""
    if len(parts) == 1:
        return parts[0][1] if parts[0][0] == target else None
    key = tuple(sorted(value for value, _ in parts))
    if key in failed:
        return None
    for i, (a, left) in enumerate(parts):
        for j, (b, right) in enumerate(parts):
            if i == j:
                continue
            rest = [part for k, part in enumerate(parts) if k not in (i, j)]
            results = [(a - b, "-")]
            if i < j:
                results += [(a + b, "+"), (a * b, "*")]
            if b:
                results.append((a / b, "/"))
            for value, sign in results:
                found = _search([*rest, (value, f"({left} {sign} {right})")], target, failed)
                if found is not None:
                    return found
    failed.add(key)
    return None


class CountdownGame(TextGame):
    """The model reaches a target with all given numbers, in up to `max_turns` tries."""

    name = "countdown"

    def __init__(
        self,
        format: Format = "answer_tag",
        words: bool = True,
        max_turns: int = 5,
        numbers_reward: float = 0.1,
    ) -> None:
        super().__init__(format, words)
        check_whole(self.name, "max_turns", max_turns, least=1)
        check_number(self.name, "numbers_reward", numbers_reward)
        self.max_turns, self.numbers_reward = max_turns, numbers_reward

    async def start(self, episode: Episode) -> Observation:
        numbers, target = episode.extra.get("numbers"), episode.answer
        if not isinstance(numbers, list | tuple) or not numbers or not isinstance(target, int):
            raise UserError(
                f"environment {self.name}: episode {episode.id} has no problem; expected rows of the task {self.name}, or rows with the "
                f"columns numbers (a list) and answer (a whole number), got numbers={numbers!r} and answer={target!r}"
            )
        self.numbers, self.target = [int(number) for number in numbers], target
        self.turn, self.num_invalid = 0, 0
        self.has_numbers = False
        """Whether the last try used exactly the given numbers."""
        self.last_value = ""
        return Observation(messages=(user_message(self._prompt()),), state=self._state())

    async def step(self, answer: Answer) -> Observation | End:
        self.turn += 1
        said = self._judge(read_answer(answer, self.format, "line"))
        if said is None:
            return End(1.0, success=True, metrics=self._metrics())
        if self.turn >= self.max_turns:
            return self._lost(said)
        text = f"{said} {self._format_sentence()}" if self.words else said
        return Observation(messages=(user_message(text),), state=self._state())

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return self._lost("")

    def _judge(self, tried: str | None) -> str | None:
        """Judge a try: None if it solves the problem, otherwise what is wrong with it."""
        self.has_numbers, self.last_value = False, ""
        result = evaluate_expression(_without_result(tried)) if tried else None
        if result is None:
            self.num_invalid += 1
            return "Invalid answer: expected one expression of numbers, + - * / and parentheses."
        value, used = result
        self.has_numbers = sorted(used) == sorted(self.numbers)
        if self.has_numbers and value == self.target:
            return None
        self.last_value = _shown(value)
        if not self.has_numbers:
            return f"Wrong numbers: use each of {self._listed()} exactly once. The value was {self.last_value}."
        return f"The value is {self.last_value}, not {self.target}."

    def _lost(self, said: str) -> End:
        reward = self.numbers_reward if self.has_numbers else 0.0
        return End(reward, success=False, text=said, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return {"tries": float(self.turn), "invalid_turns": float(self.num_invalid)}

    def _listed(self) -> str:
        return ", ".join(map(str, self.numbers))

    def _state(self) -> str:
        """The problem and the value of the last try: what a player knows who remembers one try."""
        return f"{self._listed()} to {self.target}; last {self.last_value or 'none'}"

    def _format_sentence(self) -> str:
        return format_sentence(self.format, "(1 + 2) * 3", "line")

    def _prompt(self) -> str:
        if not self.words:
            return f"{','.join(map(str, self.numbers))}={self.target}?"
        tries = "one try" if self.max_turns == 1 else f"{self.max_turns} tries"
        return (
            f"Target: {self.target}, nums: [{self._listed()}]\n"
            "Write an arithmetic expression that equals the target. Use every number exactly once, and only + - * / and parentheses. "
            f"You have {tries}; after a wrong one you are told the value that it reached. {self._format_sentence()}"
        )

    # Players.

    def random_answer(self, dice: Dice) -> str:
        return write_answer(random_expression(self.numbers, dice)[1], self.format)

    def best_answer(self) -> str:
        solution = solve(self.numbers, self.target)
        return write_answer(solution if solution is not None else " + ".join(map(str, self.numbers)), self.format)


def _without_result(tried: str) -> str:
    """The expression of a try such as `(1 + 2) * 3 = 9`."""
    return tried.partition("=")[0].strip()


def _shown(value: Fraction) -> str:
    """A value as text. A long one is described."""
    text = str(value)
    return text if len(text) <= MAX_DIGITS else "too long to show"
