"""Tic-tac-toe against a random or a perfect opponent, or against itself.

A win pays 1, a loss -1, a draw `draw_reward`. An illegal move or an unreadable answer loses. Cells are numbered 0 to 8 row by row; an answer
is a cell number, or row and column from 0 (`1 2`). All games begin with the empty board, so there are no held-out boards: a seed decides
who begins and what a random opponent plays.

In `TicTacToeSelfPlay` the model plays both sides. Each side has a conversation of its own, and the rewards of the two sides sum to zero
unless a draw pays.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games.text_game import (
    Format,
    TextGame,
    check_choice,
    check_number,
    choice,
    format_sentence,
    read_answer,
    split_of,
    user_message,
    write_answer,
)

EMPTY = "." * 9
OTHER = {"X": "O", "O": "X"}
LINES = (
    *((k, k + 1, k + 2) for k in (0, 3, 6)),
    *((k, k + 3, k + 6) for k in (0, 1, 2)),
    (0, 4, 8),
    (2, 4, 6),
)


def mover(board: str) -> str:
    """Whose turn it is. X begins."""
    return "X" if board.count("X") == board.count("O") else "O"


def winner(board: str) -> str | None:
    """The side with three in a line."""
    return next((board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), None)


def free_cells(board: str) -> list[int]:
    return [cell for cell, symbol in enumerate(board) if symbol == "."]


def play(board: str, cell: int) -> str:
    """The board after the side to move has taken a cell."""
    return board[:cell] + mover(board) + board[cell + 1 :]


@cache  # 5,478 boards can occur
def minimax(board: str) -> int:
    """The result for the side to move if both play perfectly: 1 win, 0 draw, -1 loss."""
    if winner(board) is not None:
        return -1
    return max((-minimax(play(board, cell)) for cell in free_cells(board)), default=0)


def best_cells(board: str) -> list[int]:
    """The cells whose result under perfect play is best."""
    values = {cell: -minimax(play(board, cell)) for cell in free_cells(board)}
    return [cell for cell, value in values.items() if value == max(values.values())]


def board_text(board: str) -> str:
    """Three rows; a free cell shows its number."""
    shown = "".join(str(cell) if symbol == "." else symbol for cell, symbol in enumerate(board))
    return "\n".join(shown[k : k + 3] for k in (0, 3, 6))


def read_cell(text: str | None, board: str) -> int | None:
    """The free cell that an answer names, by number or by row and column; None for anything else."""
    if text is None or len(text) > 20:
        return None
    if not re.fullmatch(r"\D*[0-8]\D*|\D*[0-2]\D+[0-2]\D*", text):
        return None
    digits = [int(digit) for digit in re.findall(r"[0-8]", text)]
    cell = digits[0] if len(digits) == 1 else 3 * digits[0] + digits[1]
    return cell if board[cell] == "." else None


class _TicTacToe(TextGame):
    """What both games share: the board and the texts."""

    def __init__(self, format: Format, words: bool, draw_reward: float) -> None:
        super().__init__(format, words)
        check_number(self.name, "draw_reward", draw_reward, -1, 1)
        self.draw_reward = draw_reward
        self.board = EMPTY

    def _text(self, side: str, is_first: bool) -> str:
        if not self.words:
            return f"{board_text(self.board)}\n{side}"
        rules = (
            f"Tic-tac-toe: you play {side}. The first side with three in a row, a column or a diagonal wins. Cells are numbered 0 to 8 row "
            "by row, and a free cell shows its number. An illegal move loses.\n\n"
        )
        state = f"State:\n{board_text(self.board)}\nYou play {side}. Choose the number of a free cell. "
        return (rules if is_first else "") + state + format_sentence(self.format)

    def _is_over(self) -> bool:
        return winner(self.board) is not None or not free_cells(self.board)

    def _reward(self, side: str) -> float:
        """The reward of a side when the game is over."""
        won = winner(self.board)
        return self.draw_reward if won is None else 1.0 if won == side else -1.0

    def random_answer(self, dice: Dice) -> str:
        return write_answer(str(choice(dice, free_cells(self.board))), self.format)

    def best_answer(self) -> str:
        return write_answer(str(best_cells(self.board)[0]), self.format)


class TicTacToe(_TicTacToe):
    """The model against an opponent: `random`, or `minimax`, which plays a random one of the perfect moves.

    `plays` is the model's side; with `either` the seed decides. Success is a win against `random`, and no loss against `minimax`.
    """

    name = "tic_tac_toe"

    def __init__(
        self,
        opponent: Literal["random", "minimax"] = "minimax",
        plays: Literal["X", "O", "either"] = "either",
        format: Format = "answer_tag",
        words: bool = True,
        draw_reward: float = 0.0,
    ) -> None:
        super().__init__(format, words, draw_reward)
        check_choice(self.name, "opponent", opponent, ("random", "minimax"))
        check_choice(self.name, "plays", plays, ("X", "O", "either"))
        self.opponent, self.plays = opponent, plays

    async def start(self, episode: Episode) -> Observation:
        self.board = EMPTY
        self._dice = Dice(self.name, split_of(episode), episode.seed)
        drawn = choice(self._dice, ("X", "O"))
        self.side = drawn if self.plays == "either" else self.plays
        if self.side == "O":
            self._opponent_plays()
        return Observation(messages=(user_message(self._text(self.side, True)),), state=self.board)

    async def step(self, answer: Answer) -> Observation | End:
        cell = read_cell(read_answer(answer, self.format), self.board)
        if cell is None:
            return End(-1.0, success=False, text="illegal move", metrics=self._metrics("lost", is_illegal=True))
        self.board = play(self.board, cell)
        if not self._is_over():
            self._opponent_plays()
        if self._is_over():
            return self._finish()
        return Observation(messages=(user_message(self._text(self.side, False)),), state=self.board)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(0.0, success=False, text=board_text(self.board), metrics=self._metrics(""))

    def _opponent_plays(self) -> None:
        cells = free_cells(self.board) if self.opponent == "random" else best_cells(self.board)
        self.board = play(self.board, choice(self._dice, cells))

    def _finish(self) -> End:
        won = winner(self.board)
        result = "drawn" if won is None else "won" if won == self.side else "lost"
        success = result == "won" or (result == "drawn" and self.opponent == "minimax")
        return End(self._reward(self.side), success=success, text=board_text(self.board), metrics=self._metrics(result))

    def _metrics(self, result: str, is_illegal: bool = False) -> dict[str, float]:
        """All results, so that the mean of each is the share of games that end with it."""
        return {name: float(name == result) for name in ("won", "drawn", "lost")} | {"illegal": float(is_illegal)}


class TicTacToeSelfPlay(_TicTacToe):
    """The model plays both sides, each in a conversation of its own. It reports no success, but metrics."""

    name = "tic_tac_toe_self_play"
    roles = ("X", "O")
    gives_success = False

    def __init__(self, format: Format = "answer_tag", words: bool = True, draw_reward: float = 0.0) -> None:
        super().__init__(format, words, draw_reward)

    async def start(self, episode: Episode) -> Observation:
        self.board = EMPTY
        return self._ask()

    async def step(self, answer: Answer) -> Observation | End:
        side = mover(self.board)
        cell = read_cell(read_answer(answer, self.format), self.board)
        if cell is None:
            rewards = {side: -1.0, OTHER[side]: 1.0}
            return End(rewards=rewards, text=f"illegal move of {side}", metrics=self._metrics("", is_illegal=True))
        self.board = play(self.board, cell)
        if not self._is_over():
            return self._ask()
        result = "drawn" if winner(self.board) is None else f"won_by_{winner(self.board)}"
        rewards = {role: self._reward(role) for role in self.roles}
        return End(rewards=rewards, text=board_text(self.board), metrics=self._metrics(result))

    async def end(self, reason: Literal["turns", "length"]) -> End:
        rewards = dict.fromkeys(self.roles, 0.0)
        return End(rewards=rewards, text=board_text(self.board), metrics=self._metrics(""))

    def _metrics(self, result: str, is_illegal: bool = False) -> dict[str, float]:
        """All results, so that the mean of each is the share of games that end with it."""
        results = ("won_by_X", "won_by_O", "drawn")
        return {name: float(name == result) for name in results} | {"illegal": float(is_illegal)}

    def _ask(self) -> Observation:
        side = mover(self.board)
        is_first = side not in self.board
        return Observation(messages=(user_message(self._text(side, is_first)),), role=side, state=self.board)
