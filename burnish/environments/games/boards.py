"""Board games of one player: turns with a few actions each, limits on both, and a penalty for invalid answers.

The loop follows RAGEN (Wang et al., 2025, arXiv 2504.20073). An answer lists actions, of which the first `max_actions_per_turn` count. Names
that are no action are skipped, and the turn has `invalid_reward` once. The valid actions are played until the game is over or `max_actions`
are spent. Unlike RAGEN, the history keeps the answer exactly as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_letters
from typing import Any, ClassVar, Literal, get_args

from burnish.config.errors import UserError
from burnish.data.tasks.picture_task import picture_between
from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games.board_pictures import board_picture
from burnish.environments.games.text_game import (
    SEPARATOR,
    Format,
    TextGame,
    check_choice,
    check_number,
    check_whole,
    choice,
    format_sentence,
    read_answer,
    user_message,
    write_answer,
)

Direction = Literal["Up", "Down", "Left", "Right"]
STEPS: dict[str, tuple[int, int]] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""Change of (row, column) by direction."""
Description = Literal["places", "board"]
CELL_LETTERS = ascii_letters
ObservationKind = Literal["grid", "grid_coord", "picture"]
"""How a board is shown: as text, as text with coordinates, or as a picture."""


def check_observation(game: str, observation: str) -> None:
    """Raise a UserError for an unknown kind of observation."""
    check_choice(game, "observation", observation, get_args(ObservationKind))


def cell_name(cell: int, width: int) -> str:
    """The coordinates of a cell, from (0, 0) at the top left."""
    return f"({cell // width}, {cell % width})"


class BoardGame(TextGame):
    """One player on a board. A game fills in `reset`, `rules`, `board`, `move` and `solution`."""

    actions: tuple[str, ...]
    """The actions; a game may set them in `reset`."""
    is_over = False
    is_solved = False
    tile_layers: ClassVar[Mapping[str, str]] = {}
    """What the symbols of the board are drawn as; empty for a game without pictures."""
    observation: ObservationKind = "grid"
    located: ClassVar[tuple[str, ...]] = ()
    """Things whose places the players can write before an answer: for each, the symbols of the board that show it."""
    described: Description | None = None
    """What the players write before each answer. places: row and column of each of these things, from 0 0 at the top left, `12 33`. board: the
    letter of its cell, `fl`, and before the first answer every cell, a letter and what is in it: `a_b_cOdP`. None: nothing."""

    def __init__(
        self,
        format: Format,
        words: bool,
        max_turns: int,
        max_actions: int,
        max_actions_per_turn: int,
        invalid_reward: float,
    ) -> None:
        super().__init__(format, words)
        for key, value in (
            ("max_turns", max_turns),
            ("max_actions", max_actions),
            ("max_actions_per_turn", max_actions_per_turn),
        ):
            check_whole(self.name, key, value, least=1)
        check_number(self.name, "invalid_reward", invalid_reward)
        self.max_turns, self.max_actions, self.invalid_reward = max_turns, max_actions, invalid_reward
        self.max_actions_per_turn = 1 if format == "last_word" else max_actions_per_turn
        self.turn = self.num_actions = self.num_invalid = 0

    # A game fills in these.

    def reset(self, episode: Episode) -> None:
        """Make the board of an episode."""
        raise NotImplementedError

    def rules(self) -> str:
        """What the game is, in words: cells, actions, rewards."""
        raise NotImplementedError

    def board(self) -> str:
        """The board as text, without counters."""
        raise NotImplementedError

    def details(self) -> str:
        """More about the board for the observation, such as coordinates; empty for none."""
        return ""

    def move(self, action: str) -> float:
        """Play one action, set `is_over` and `is_solved`, and return its reward."""
        raise NotImplementedError

    def solution(self) -> list[str]:
        """The actions of a best player from here on, at least one."""
        raise NotImplementedError

    # The loop.

    @property
    def actions_left(self) -> int:
        return self.max_actions - self.num_actions

    async def start(self, episode: Episode) -> Observation:
        self.turn = self.num_actions = self.num_invalid = 0
        self.is_over = self.is_solved = False
        self.reset(episode)
        before = f"{self.rules()}\n\n{self._turn_head()}" if self.words else ""
        return self._seen(before, 0.0)

    async def step(self, answer: Answer) -> Observation | End:
        self.turn += 1
        written = read_answer(answer, self.format)
        named = [part.strip() for part in written.split(SEPARATOR)][: self.max_actions_per_turn] if written else []
        canonical = {action.lower(): action for action in self.actions}
        valid = [canonical[part.lower()] for part in named if part.lower() in canonical]
        is_valid = bool(named) and len(valid) == len(named)
        reward = 0.0 if is_valid else self.invalid_reward
        self.num_invalid += not is_valid
        for action in valid[: self.actions_left]:
            self.num_actions += 1
            reward += self.move(action)
            if self.is_over:
                break
        if self.is_over or self.turn >= self.max_turns or self.actions_left == 0:
            return self._finish(reward)
        return self._seen(self._reply_head(reward, is_valid) if self.words else "", reward)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return self._finish(0.0)

    def _finish(self, reward: float) -> End:
        metrics = {"actions": float(self.num_actions), "invalid_turns": float(self.num_invalid)}
        return End(reward, success=self.is_solved, text=self._board_text(), metrics=metrics)

    # What the model reads.

    def _seen(self, before: str, reward: float) -> Observation:
        """The board with the text before it and, in words, what may be answered behind it."""
        behind = self._turn_tail() if self.words else ""
        content: str | list[dict[str, Any]] = f"{before}{self._board_text()}{behind}"
        if self.observation == "picture":
            content = picture_between(before, board_picture(self.board(), self.tile_layers), behind)
        return Observation(messages=(user_message(content),), reward=reward, state=self.board())

    def _board_text(self) -> str:
        details = self.details()
        return f"{self.board()}\n{details}" if details else self.board()

    def _turn_head(self) -> str:
        return f"Turn {self.turn + 1}:\nState:\n"

    def _turn_tail(self) -> str:
        most = min(self.max_actions_per_turn, self.actions_left)
        example = f"first action {SEPARATOR} second action" if most > 1 else ""  # naming real ones would suggest them
        return f"\n{self._limits_text(most)}{format_sentence(self.format, example)}"

    def _limits_text(self, most: int) -> str:
        if self.max_actions == 1:
            return ""
        left = f"{self.actions_left} action{'s' if self.actions_left > 1 else ''} left"
        per_turn = f", at most {most} in this turn, separated by {SEPARATOR}" if most > 1 else ", one in this turn"
        return f"You have {left}{per_turn}. "

    def _reply_head(self, reward: float, is_valid: bool) -> str:
        problem = f"Invalid answer: expected actions out of {', '.join(self.actions)}.\n" if not is_valid else ""
        return f"{problem}Reward: {reward:.3g}\n\n{self._turn_head()}"

    # Players.

    def write_actions(self, actions: list[str]) -> str:
        """An answer with these actions."""
        return write_answer(f" {SEPARATOR} ".join(actions), self.format, self.description())

    def description(self) -> str:
        """What the players see, as they write it before an answer."""
        if self.described is None:
            return ""
        lines = self.board().splitlines()
        symbols = "".join(lines)
        if self.described == "places":
            return " ".join(f"{cell // len(lines[0])}{cell % len(lines[0])}" for cell in self._located_cells(symbols))
        if len(symbols) > len(CELL_LETTERS):
            raise UserError(
                f"{self.name}: letters name the cells of a described board, so it may have {len(CELL_LETTERS)}, not {len(symbols)}"
            )
        where = "".join(CELL_LETTERS[cell] for cell in self._located_cells(symbols))
        if self.turn > 0:
            return where
        return "".join(map("".join, zip(CELL_LETTERS, symbols, strict=False))) + f" {where}"

    def _located_cells(self, symbols: str) -> list[int]:
        """The cells of each thing of `located`, in order."""
        return [cell for thing in self.located for cell, symbol in enumerate(symbols) if symbol in thing]

    def random_answer(self, dice: Dice) -> str:
        return self.write_actions([choice(dice, self.actions)])

    def best_answer(self) -> str:
        return self.write_actions(self.solution()[: min(self.max_actions_per_turn, self.actions_left)])
