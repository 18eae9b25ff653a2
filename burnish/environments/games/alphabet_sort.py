"""Alphabet sort: sort names, then merge more names into the sorted list, over a few turns. The rules are those of verifiers.

In the first turn the model sorts a few names by first or by last name, inside `<alphabetical_sorted>`. In each later turn it gets more names
and writes the whole sorted list inside `<combined_alphabetical_sorted>`, with `// new name!` behind each new one.

A turn scores the similarity of its list with the right one (`difflib.SequenceMatcher`, lower case), to the power `power`. An answer with
several lists scores the last one, and only if each list is better than the one before. The reward at the end is the mean over turns. With
`power_of: mean` the power is applied once, to the mean of the similarities. Success means that every list was right.

First and last names of test rows never occur in train rows.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Literal

from burnish.config.errors import UserError
from burnish.data.tasks.task import Dice, check_span
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games.names import FIRST_NAMES, LAST_NAMES
from burnish.environments.games.text_game import (
    Game,
    check_choice,
    check_number,
    choice,
    sample,
    shuffled,
    split_of,
    user_message,
)

FIRST_TAG = "alphabetical_sorted"
LATER_TAG = "combined_alphabetical_sorted"
NEW_MARK = "// new name!"
MAX_LENGTH_RATIO = 4
"""A list this many times as long as the right one scores 0, without a comparison that could take seconds."""

Name = tuple[str, str]


def names_of_split(split: str) -> tuple[list[str], list[str]]:
    """The first and last names of a split. Every fourth name is held out."""
    is_test = split == "test"
    first, last = (
        [name for index, name in enumerate(names) if (index % 4 == 0) == is_test] for names in (FIRST_NAMES, LAST_NAMES)
    )
    return first, last


MAX_NAMES_IN_ALL = min(len(names) for names in names_of_split("test"))


def similarity(written: str, right: str) -> float:
    """The similarity of two lists, from 0 to 1, ignoring case and blanks around lines.

    Python's heuristic for popular characters acts on lists of 200 characters or more, as it does in verifiers.
    """
    a, b = (
        "\n".join(line.strip().lower() for line in text.strip().splitlines() if line.strip())
        for text in (written, right)
    )
    if len(a) > MAX_LENGTH_RATIO * len(b):
        return 0.0
    return SequenceMatcher(None, a, b).ratio()


def score_turn(text: str, tag: str, right: str) -> float:
    """The similarity of the list in an answer. Several lists count only if each is better than the one before."""
    scores = [similarity(written, right) for written in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[:8]]
    if not scores or any(later <= earlier for earlier, later in zip(scores, scores[1:], strict=False)):
        return 0.0
    return scores[-1]


class AlphabetSort(Game):
    """The model sorts names, and merges `min_names` to `max_names` new ones in each of `min_turns` to `max_turns` turns."""

    name = "alphabet_sort"

    def __init__(
        self,
        min_turns: int = 1,
        max_turns: int = 3,
        min_names: int = 1,
        max_names: int = 5,
        power: float = 4.0,
        power_of: Literal["turn", "mean"] = "turn",
    ) -> None:
        check_span(self.name, "turns", min_turns, max_turns, least=1, most=MAX_NAMES_IN_ALL)
        check_span(self.name, "names", min_names, max_names, least=1, most=MAX_NAMES_IN_ALL)
        if max_turns * max_names > MAX_NAMES_IN_ALL:
            raise UserError(
                f"{self.name}: max_turns * max_names is {max_turns * max_names}, but there are {MAX_NAMES_IN_ALL} held-out names"
            )
        check_number(self.name, "power", power, 1, 100)
        check_choice(self.name, "power_of", power_of, ("turn", "mean"))
        self.min_turns, self.max_turns, self.min_names, self.max_names = min_turns, max_turns, min_names, max_names
        self.power, self.power_of = power, power_of

    async def start(self, episode: Episode) -> Observation:
        split = split_of(episode)
        dice = Dice(self.name, split, episode.seed)
        first, last = names_of_split(split)
        sizes = [
            dice.between(self.min_names, self.max_names) for _ in range(dice.between(self.min_turns, self.max_turns))
        ]
        drawn = list(zip(sample(dice, first, sum(sizes)), sample(dice, last, sum(sizes)), strict=True))
        self.lists: list[list[Name]] = []
        """The new names of each turn, in the order in which they are shown."""
        for size in sizes:
            self.lists.append([drawn.pop() for _ in range(size)])
        self.by = choice(dice, ("FIRST", "LAST"))
        self.scores: list[float] = []
        return Observation(messages=(user_message(self._question()),), state=self._shown(self.lists[0]))

    async def step(self, answer: Answer) -> Observation | End:
        text = "" if answer.finish == "length" else answer.text
        self.scores.append(score_turn(text, self._tag(), self.right_list()))
        if len(self.scores) == len(self.lists):
            return self._finish()
        return Observation(messages=(user_message(self._question()),), state=self._shown(self._known()))

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return self._finish()

    def right_list(self) -> str:
        """The right list of the turn: all names so far, sorted, with the new ones marked after the first turn."""
        new = set(self.lists[self._turn]) if self._turn else set()
        rank = 0 if self.by == "FIRST" else 1
        lines = sorted(self._known(), key=lambda name: name[rank])
        return "\n".join(f"{a}{b} {NEW_MARK}" if (a, b) in new else f"{a}{b}" for a, b in lines)

    @property
    def _turn(self) -> int:
        return len(self.scores)

    def _tag(self) -> str:
        return LATER_TAG if self._turn else FIRST_TAG

    def _known(self) -> list[Name]:
        return [name for names in self.lists[: self._turn + 1] for name in names]

    @staticmethod
    def _shown(names: list[Name]) -> str:
        return "\n".join(a + b for a, b in names)

    def _question(self) -> str:
        shown = self._shown(self.lists[self._turn])
        if self._turn == 0:
            return (
                f"Sort these names alphabetically by {self.by} name. Each is a first name and a last name written together. Write one name "
                f"a line, in this form:\n<{FIRST_TAG}>\nNameOne\nNameTwo\n</{FIRST_TAG}>\n\n{shown}"
            )
        return (
            f"Here are more names. Sort all names so far by {self.by} name, those of earlier turns included. Put `{NEW_MARK}` behind each name "
            f"that is new in this turn, in this form:\n<{LATER_TAG}>\nNameOne\nNameTwo {NEW_MARK}\n</{LATER_TAG}>\n\n{shown}"
        )

    def _finish(self) -> End:
        scores = [*self.scores, *([0.0] * (len(self.lists) - len(self.scores)))]
        if self.power_of == "turn":
            reward = sum(score**self.power for score in scores) / len(scores)
        else:
            reward = (sum(scores) / len(scores)) ** self.power
        return End(
            reward, success=all(score == 1.0 for score in scores), metrics={"similarity": sum(scores) / len(scores)}
        )

    # Players.

    def random_answer(self, dice: Dice) -> str:
        lines = shuffled(dice, self.right_list().splitlines())
        return "\n".join((f"<{self._tag()}>", *lines, f"</{self._tag()}>"))

    def best_answer(self) -> str:
        return f"<{self._tag()}>\n{self.right_list()}\n</{self._tag()}>"
