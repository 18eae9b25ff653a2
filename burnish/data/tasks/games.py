"""Rows of the games: a seed and a split. The environment of the same name (`burnish/environments/games/`) makes the board.

Train rows have the seeds 10,000, 10,001, ... of run seed 0; run seed k begins at 10,000 + k * 1,000,000. Test rows have the seeds 123, 124, ...
whatever the run's seed, so that all runs are measured on the same boards. Both are the seeds of RAGEN (Wang et al., 2025). Different seeds
alone do not keep boards apart: small boards repeat. So a game gives a board only to the split that the board itself belongs to.
"""

from __future__ import annotations

from typing import Any

from burnish.config.errors import UserError, unknown_name_error
from burnish.data.codes import PATTERNS
from burnish.data.row import Row
from burnish.data.tasks.task import SPLITS

FIRST_TRAIN_SEED = 10_000
FIRST_TEST_SEED = 123
SEEDS_PER_RUN_SEED = 1_000_000
GAME_ALPHABET = "".join(map(chr, range(32, 127))) + "\n√"
ALPHABETS = {"tabletop": GAME_ALPHABET + PATTERNS}
"""Alphabets of games whose boards are not written in the usual characters."""


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """Raise a UserError: a text alone cannot be scored, because the environment gives the rewards."""
    name = extra.get("task", "the game")
    raise UserError(
        f"task {name} has no checker of texts: set environment.name={name} and environment.max_turns; the environment gives the rewards"
    )


class GameTask:
    """Seeds for one game. All options belong to the environment."""

    name: str
    alphabet = GAME_ALPHABET
    score = staticmethod(score)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def row(self, split: str, index: int) -> Row:
        """The index-th row of a split."""
        if split not in SPLITS:
            raise unknown_name_error("split", split, SPLITS)
        first = FIRST_TEST_SEED if split == "test" else FIRST_TRAIN_SEED + self.seed * SEEDS_PER_RUN_SEED
        seed = first + index
        extra = {"task": self.name, "seed": seed, "split": split}
        return Row(f"{self.name}/{split}/{index}", f"{self.name} {seed}", self.name, None, extra)


GAMES = (
    "sokoban",
    "frozen_lake",
    "bandit",
    "game_2048",
    "tic_tac_toe",
    "tic_tac_toe_self_play",
    "kuhn_poker",
    "propose_sum",
    "alphabet_sort",
    "tabletop",
)
GAME_TASKS: dict[str, type[GameTask]] = {
    name: type(name, (GameTask,), {"name": name, "alphabet": ALPHABETS.get(name, GAME_ALPHABET)}) for name in GAMES
}
"""Tasks of games by name. The game `countdown` takes the rows of the task `countdown`."""
