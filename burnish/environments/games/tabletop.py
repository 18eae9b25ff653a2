"""Tabletop: a robot's gripper puts a block onto a goal, in actions of three codes each. Nothing in it is text.

It is the setting of SimpleVLA-RL (Li et al. 2025, 2509.09674; recipes/simple_vla.yaml) in small: a policy writes chunks of discretised
actions as OpenVLA does (Kim et al. 2024, 2406.09246), a simulator plays them, and only success is rewarded, with 1. The simulator is written
here: a table of one by one, seen from above.

- An action is (dx, dy, grip), each a code of 0 to `bins` - 1. The code c of a movement stands for the middle of the c-th of `bins` equal
  parts of -0.25..0.25. A grip of `bins` / 2 or more closes the gripper.
- A gripper that closes within 0.12 of the block takes it along, until it opens. The episode is solved when the block lies within 0.15 of
  the goal and the gripper is open.
- The model reads five codes, as from a camera on the wrist: where block and goal are from the gripper (dx and dy of each, in `bins` equal
  parts of -1..1), then `bins` for an open gripper, `bins` + 1 for a closed one and `bins` + 2 for one that holds the block.

An answer is a chunk of `chunk` actions, which are played one after the other. Any other answer moves nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from burnish.data.codes import read_codes, write_codes
from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games.text_game import Game, board_of_seed, check_whole, split_of, user_message

MAX_STEP = 0.25
REACH = 0.12
GOAL_RADIUS = 0.15
CODES_PER_ACTION = 3
Point = tuple[float, float]


@dataclass(frozen=True)
class Table:
    """The positions on a table: gripper, block and goal, and the state of the gripper."""

    gripper: Point
    block: Point
    goal: Point
    is_closed: bool = False
    is_holding: bool = False

    def after(self, dx: float, dy: float, closes: bool) -> Table:
        """Return the table after an action: the gripper opens or closes first, then it moves."""
        near = math.dist(self.gripper, self.block) <= REACH
        is_holding = closes and (self.is_holding or (near and not self.is_closed))
        gripper = _on_table(self.gripper[0] + dx), _on_table(self.gripper[1] + dy)
        return Table(gripper, gripper if is_holding else self.block, self.goal, closes, is_holding)

    @property
    def is_solved(self) -> bool:
        return not self.is_closed and math.dist(self.block, self.goal) <= GOAL_RADIUS


def _on_table(coordinate: float) -> float:
    return min(max(coordinate, 0.0), 1.0)


def table_of_seed(seed: int, split: str, bins: int) -> Table:
    """The table of a seed in a split. What the model reads decides the split."""

    def propose(dice: Dice) -> tuple[str, Table] | None:
        gripper, block, goal = ((0.05 + 0.9 * dice.unit(), 0.05 + 0.9 * dice.unit()) for _ in range(3))
        table = Table(gripper, block, goal)
        is_apart = math.dist(block, goal) > 0.25
        return (f"tabletop\n{state_codes(table, bins)}", table) if is_apart else None

    return board_of_seed("tabletop", seed, split, propose, (bins,))


def state_codes(table: Table, bins: int) -> list[int]:
    """What the model reads: where block and goal are from the gripper, and the state of the gripper."""
    offsets = [point[axis] - table.gripper[axis] for point in (table.block, table.goal) for axis in (0, 1)]
    cells = [min(int((offset + 1) / 2 * bins), bins - 1) for offset in offsets]
    return [*cells, bins + table.is_closed + table.is_holding]


def movement(code: int, bins: int) -> float:
    """The distance that the code of a movement stands for."""
    return ((code + 0.5) / bins * 2 - 1) * MAX_STEP


def movement_code(distance: float, bins: int) -> int:
    """The code of the movement nearest to a distance."""
    return min(max(math.floor((distance / MAX_STEP + 1) / 2 * bins), 0), bins - 1)


class Tabletop(Game):
    """A robot puts a block onto a goal, by chunks of discretised actions. Success is rewarded with 1."""

    name = "tabletop"

    def __init__(self, bins: int = 32, chunk: int = 2, max_turns: int = 6) -> None:
        check_whole(self.name, "bins", bins, least=8, most=253)
        check_whole(self.name, "chunk", chunk, least=1, most=32)
        check_whole(self.name, "max_turns", max_turns, least=1)
        self.bins, self.chunk, self.max_turns = bins, chunk, max_turns
        self.turn = self.num_actions = self.num_invalid = 0

    async def start(self, episode: Episode) -> Observation:
        self.turn = self.num_actions = self.num_invalid = 0
        self.table = table_of_seed(episode.seed, split_of(episode), self.bins)
        return self._seen()

    async def step(self, answer: Answer) -> Observation | End:
        self.turn += 1
        actions = self._read_actions(answer)
        self.num_invalid += actions is None
        for dx, dy, grip in actions or []:
            self.num_actions += 1
            self.table = self.table.after(movement(dx, self.bins), movement(dy, self.bins), grip >= self.bins / 2)
            if self.table.is_solved:
                return self._finish(1.0)
        return self._finish(0.0) if self.turn >= self.max_turns else self._seen()

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return self._finish(0.0)

    def _read_actions(self, answer: Answer) -> list[tuple[int, int, int]] | None:
        """The actions of an answer; None unless it is exactly one chunk of codes."""
        codes = read_codes(answer.text) or []
        if len(codes) != self.chunk * CODES_PER_ACTION or max(codes) >= self.bins:
            return None
        return [(codes[i], codes[i + 1], codes[i + 2]) for i in range(0, len(codes), CODES_PER_ACTION)]

    def _seen(self) -> Observation:
        text = write_codes(state_codes(self.table, self.bins))
        return Observation(messages=(user_message(text),), state=text)

    def _finish(self, reward: float) -> End:
        metrics = {"actions": float(self.num_actions), "invalid_turns": float(self.num_invalid)}
        text = write_codes(state_codes(self.table, self.bins))
        return End(reward, success=reward > 0, text=text, metrics=metrics)

    # Players.

    def random_answer(self, dice: Dice) -> str:
        return write_codes(dice.between(0, self.bins - 1) for _ in range(self.chunk * CODES_PER_ACTION))

    def best_answer(self) -> str:
        codes: list[int] = []
        table = self.table
        for _ in range(self.chunk):
            action = self._best_action(table)
            dx, dy, grip = action
            table = table.after(movement(dx, self.bins), movement(dy, self.bins), grip >= self.bins / 2)
            codes += action
        return write_codes(codes)

    def _best_action(self, table: Table) -> tuple[int, int, int]:
        """Go to the block and close; go to the goal and open."""
        aim = table.goal if table.is_holding else table.block
        is_there = math.dist(table.gripper, aim) <= REACH
        if is_there and not table.is_holding:
            aim, closes = table.goal, not table.is_closed
        else:
            closes = table.is_holding and not is_there
        dx, dy = (movement_code(aim[i] - table.gripper[i], self.bins) for i in (0, 1))
        return dx, dy, self.bins - 1 if closes else 0
