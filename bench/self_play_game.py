"""The game of `bench/self_play.py`: tic-tac-toe with a written thought, in self-play while training and against a fixed opponent elsewhere.

An answer is a thought and a cell: the numbers of all free cells in one word, then the number of the chosen one. Only the last word counts,
so a model may stop thinking. In validation the other side plays random legal moves, the same for every run and step.
"""

from __future__ import annotations

import asyncio
from typing import Any

from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games.demonstrations import FIRST_SEED, play_episode
from burnish.environments.games.text_game import choice
from burnish.environments.games.tic_tac_toe import OTHER, TicTacToeSelfPlay, best_cells, free_cells, play, winner


class ThinkingTicTacToe(TicTacToeSelfPlay):
    """Self-play in training; against random moves in validation, where the seed decides the model's side."""

    runs_in = "runner"

    def __init__(self) -> None:
        super().__init__(format="last_word", words=False)

    async def start(self, episode: Episode) -> Observation:
        self.own: str | None = None
        self.thoughts: list[int] = []
        seen = await super().start(episode)
        if not episode.is_training:
            self._dice = Dice("random opponent", episode.seed)
            self.own = choice(self._dice, ("X", "O"))
            if self.own == "O":
                self.board = play(self.board, choice(self._dice, free_cells(self.board)))
                seen = self._ask()
        return seen

    async def step(self, answer: Answer) -> Observation | End:
        words = answer.text.split()
        self.thoughts.append(sum(map(len, words[:-1])))
        seen = await super().step(answer)
        if self.own is not None and not isinstance(seen, End):
            self.board = play(self.board, choice(self._dice, free_cells(self.board)))
            if not self._is_over():
                return self._ask()
            result = "drawn" if winner(self.board) is None else f"won_by_{winner(self.board)}"
            rewards = {role: self._reward(role) for role in self.roles}
            seen = End(rewards=rewards, metrics=self._metrics(result))
        return seen

    def _metrics(self, result: str, is_illegal: bool = False) -> dict[str, float]:
        found = super()._metrics(result, is_illegal)
        if self.own is not None:
            found["won"] = float(result == f"won_by_{self.own}")
            found["lost"] = float(is_illegal or result == f"won_by_{OTHER[self.own]}")
        return found | {"thought_chars": sum(self.thoughts) / max(1, len(self.thoughts))}

    def random_answer(self, dice: Dice) -> str:
        return self._thought() + str(choice(dice, free_cells(self.board)))

    def best_answer(self) -> str:
        return self._thought() + str(best_cells(self.board)[0])

    def _thought(self) -> str:
        return "".join(map(str, free_cells(self.board))) + " "


def demonstrations(num: int, noise: float) -> list[dict[str, Any]]:
    """Rows of prompt and completion: games in which a share `noise` of the moves is random."""

    async def play_all() -> list[dict[str, Any]]:
        rows = []
        for index in range(num):
            game, episode = ThinkingTicTacToe(), Episode(str(index), FIRST_SEED + index, "", is_training=True)
            talks, _ = await play_episode(game, episode, noise, Dice("demonstrations", index))
            rows += [{"prompt": talk[0]["content"], "completion": talk[1:]} for talk in talks.values()]
        return rows

    return asyncio.run(play_all())
