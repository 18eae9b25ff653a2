"""A bandit with two named arms, one turn: does the model choose the arm that pays more on average?

The steady arm always pays 0.1. The bold arm pays 1 with probability 0.25 and otherwise nothing, so it is the better one. Only the names hint
at which is which, as in RAGEN (Wang et al., 2025, arXiv 2504.20073): 12 pairs of names are for training, 8 others for tests.
"""

from __future__ import annotations

from burnish.data.tasks.task import Dice
from burnish.environments.base import Episode
from burnish.environments.games.boards import BoardGame
from burnish.environments.games.text_game import Format, check_number, choice, shuffled, split_of

PAIRS = {
    "train": (
        ("Archivist", "Explorer"),
        ("Gardener", "Gambler"),
        ("Clerk", "Inventor"),
        ("Baker", "Stuntman"),
        ("Notary", "Prospector"),
        ("Shepherd", "Corsair"),
        ("Tailor", "Founder"),
        ("Farmer", "Speculator"),
        ("Curator", "Racer"),
        ("Nurse", "Acrobat"),
        ("Postman", "Pioneer"),
        ("Cook", "Astronaut"),
    ),
    "test": (
        ("Bookkeeper", "Adventurer"),
        ("Janitor", "Daredevil"),
        ("Carpenter", "Alchemist"),
        ("Miller", "Buccaneer"),
        ("Registrar", "Venturer"),
        ("Weaver", "Mountaineer"),
        ("Caretaker", "Wildcatter"),
        ("Typist", "Magician"),
    ),
}
"""Names of the (steady, bold) arm, by split."""


class Bandit(BoardGame):
    """The model pulls one of two arms, once. The steady arm pays `steady_reward`; the bold arm pays 1 with probability `bold_chance`."""

    name = "bandit"

    def __init__(
        self,
        steady_reward: float = 0.1,
        bold_chance: float = 0.25,
        format: Format = "answer_tag",
        words: bool = True,
        invalid_reward: float = -0.1,
    ) -> None:
        super().__init__(format, words, 1, 1, 1, invalid_reward)
        check_number(self.name, "steady_reward", steady_reward)
        check_number(self.name, "bold_chance", bold_chance, 0, 1)
        self.steady_reward, self.bold_chance = steady_reward, bold_chance

    def reset(self, episode: Episode) -> None:
        split = split_of(episode)
        dice = Dice(self.name, split, episode.seed)
        self.steady, self.bold = choice(dice, PAIRS[split])
        self.actions = tuple(shuffled(dice, (self.steady, self.bold)))
        self._does_pay = dice.unit() < self.bold_chance

    def rules(self) -> str:
        return (
            f"A machine has two arms, named {' and '.join(self.actions)}. One pays little, and always the same. The other pays nothing "
            "most of the time, and sometimes a lot. Think about what the names say about the arms, and pull the one that pays more on average.\n"
            f"Actions: {', '.join(self.actions)}."
        )

    def board(self) -> str:
        return " or ".join(self.actions)

    def move(self, action: str) -> float:
        self.is_over = True
        self.is_solved = (action == self.bold) == (self.bold_chance >= self.steady_reward)
        return float(self._does_pay) if action == self.bold else self.steady_reward

    def solution(self) -> list[str]:
        return [self.bold if self.bold_chance >= self.steady_reward else self.steady]
