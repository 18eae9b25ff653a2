"""2048: slide and merge tiles on a 4x4 board. Rewards are RAGEN's: 0.1 * log2(merged + 1) a move, with the sum of the merged tiles.

A new tile appears after every move: 2 with probability 0.9, otherwise 4. A move that changes nothing has reward 0 and adds no tile. The game
is over when no move changes the board, or at the tile `goal`, which counts as solved. The limits on turns and actions are chosen here.
"""

from __future__ import annotations

import math

from burnish.config.errors import UserError
from burnish.data.tasks.task import Dice
from burnish.environments.base import Episode
from burnish.environments.games.boards import STEPS, BoardGame
from burnish.environments.games.text_game import Format, board_of_seed, check_whole, choice, split_of

SIZE = 4
Tiles = tuple[int, ...]
"""The 16 tiles row by row; 0 is an empty cell."""


def slide_line(line: Tiles) -> tuple[Tiles, int]:
    """Slide a line of tiles to its front. Returns the new line and the sum of the tiles that merging made.

    Equal neighbours merge from the front on, and a tile merges once a move.
    """
    tiles = [tile for tile in line if tile]
    merged: list[int] = []
    gained = index = 0
    while index < len(tiles):
        if index + 1 < len(tiles) and tiles[index] == tiles[index + 1]:
            merged.append(2 * tiles[index])
            gained += 2 * tiles[index]
            index += 2
        else:
            merged.append(tiles[index])
            index += 1
    return (*merged, *([0] * (len(line) - len(merged)))), gained


def slide(tiles: Tiles, action: str) -> tuple[Tiles, int]:
    """The board after a move, without the new tile, and the sum of the tiles that merging made."""
    result, gained = [0] * SIZE**2, 0
    for k in range(SIZE):
        cells = range(k * SIZE, (k + 1) * SIZE) if action in ("Left", "Right") else range(k, SIZE**2, SIZE)
        order = cells if action in ("Left", "Up") else cells[::-1]
        line, merged = slide_line(tuple(tiles[cell] for cell in order))
        gained += merged
        for cell, tile in zip(order, line, strict=True):
            result[cell] = tile
    return tuple(result), gained


def add_tile(tiles: Tiles, dice: Dice) -> Tiles:
    """The board with a new tile on a random empty cell."""
    cell = choice(dice, [index for index, tile in enumerate(tiles) if not tile])
    return (*tiles[:cell], 2 if dice.unit() < 0.9 else 4, *tiles[cell + 1 :])


def legal_moves(tiles: Tiles) -> list[str]:
    """The moves that change the board."""
    return [action for action in STEPS if slide(tiles, action)[0] != tiles]


class Game2048(BoardGame):
    """The model slides and merges tiles: 2048 on a 4x4 board. The tile `goal` wins."""

    name = "game_2048"
    actions = tuple(STEPS)

    def __init__(
        self,
        goal: int = 2048,
        format: Format = "answer_tag",
        words: bool = True,
        max_turns: int = 100,
        max_actions: int = 1000,
        max_actions_per_turn: int = 10,
        invalid_reward: float = -0.1,
    ) -> None:
        super().__init__(format, words, max_turns, max_actions, max_actions_per_turn, invalid_reward)
        check_whole(self.name, "goal", goal, least=8, most=65536)
        if goal & (goal - 1):
            raise UserError(f"{self.name}: goal should be a power of two, got {goal}")
        self.goal = goal

    def reset(self, episode: Episode) -> None:
        def propose(dice: Dice) -> tuple[str, Tiles]:
            tiles = add_tile(add_tile((0,) * SIZE**2, dice), dice)
            return f"{self.name} {tiles}", tiles

        self.tiles = board_of_seed(self.name, episode.seed, split_of(episode), propose)
        self._new_tiles = Dice(self.name, "tiles", split_of(episode), episode.seed)

    def rules(self) -> str:
        return (
            "2048: a move slides all tiles to one side. Two equal tiles that meet become one tile of their sum. Then a new tile, 2 or 4, "
            f"appears on an empty cell (a dot). Reach the tile {self.goal}. The game is over when no move changes the board.\n"
            f"Actions: {', '.join(self.actions)}.\n"
            "Rewards: 0.1 * log2(sum of merged tiles + 1) for each move."
        )

    def board(self) -> str:
        rows = (self.tiles[k : k + SIZE] for k in range(0, SIZE**2, SIZE))
        return "\n".join(" ".join(str(tile or ".") for tile in row) for row in rows)

    def move(self, action: str) -> float:
        moved, gained = slide(self.tiles, action)
        if moved == self.tiles:
            return 0.0
        self.tiles = add_tile(moved, self._new_tiles)
        self.is_solved = max(self.tiles) >= self.goal
        self.is_over = self.is_solved or not legal_moves(self.tiles)
        return 0.1 * math.log2(gained + 1)

    def random_answer(self, dice: Dice) -> str:
        return self.write_actions([choice(dice, legal_moves(self.tiles))])

    def solution(self) -> list[str]:
        """One move of a greedy player: the one that leaves the most empty cells. Perfect play is out of reach."""
        return [max(legal_moves(self.tiles), key=lambda action: slide(self.tiles, action)[0].count(0))]
