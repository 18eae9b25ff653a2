"""FrozenLake: walk over ice to the goal, around the holes. The defaults are those of RAGEN: 4x4 cells, 10 actions in 5 turns.

Each cell is frozen with probability `frozen`, start and goal are two different random cells, and a board counts only if a path over frozen
cells connects them. Reward 1 on the goal, otherwise 0; a hole ends the game. On slippery ice a step goes the intended way with
`success_rate`, and otherwise to one of the two sides; gymnasium's slippery lake is `success_rate` 1/3. All samples of a group slip alike:
the k-th action of an episode always draws the same random number.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.data.tasks.task import Dice
from burnish.environments.base import Episode
from burnish.environments.games.board_pictures import LAKE_TILES
from burnish.environments.games.boards import STEPS, BoardGame, ObservationKind, cell_name, check_observation
from burnish.environments.games.text_game import Format, board_of_seed, check_number, check_whole, split_of

ACTIONS = ("Left", "Down", "Right", "Up")
"""In a circle, so that the neighbours of an action are its two perpendicular ones."""


@dataclass(frozen=True)
class Lake:
    """A lake of `size` x `size` cells, numbered row by row."""

    size: int
    holes: frozenset[int]
    start: int
    goal: int

    def step(self, cell: int, action: str) -> int:
        """The cell after a step in this direction; the border stops a step."""
        row, column = divmod(cell, self.size)
        down, right = STEPS[action]
        row, column = row + down, column + right
        inside = 0 <= row < self.size and 0 <= column < self.size
        return row * self.size + column if inside else cell

    def is_end(self, cell: int) -> bool:
        return cell in self.holes or cell == self.goal

    def has_path(self) -> bool:
        """Whether the goal can be reached from the start over frozen cells."""
        reached, edge = {self.start}, [self.start]
        while edge:
            cell = edge.pop()
            following = {self.step(cell, action) for action in ACTIONS} - self.holes - reached
            reached |= following
            edge += following
        return self.goal in reached

    def text(self, player: int) -> str:
        """The board: `P` player, `_` ice, `O` hole, `G` goal, `X` player in a hole, `√` player on the goal."""
        symbols = ["O" if cell in self.holes else "_" for cell in range(self.size**2)]
        symbols[self.goal] = "G"
        symbols[player] = "X" if player in self.holes else "√" if player == self.goal else "P"
        return "\n".join("".join(symbols[row * self.size : (row + 1) * self.size]) for row in range(self.size))


def generate_lake(size: int, frozen: float, dice: Dice) -> Lake | None:
    """One attempt at a lake; None if no path leads to the goal."""
    cells = list(range(size**2))
    start = cells.pop(dice.between(0, len(cells) - 1))
    goal = cells.pop(dice.between(0, len(cells) - 1))
    holes = frozenset(cell for cell in cells if dice.unit() >= frozen)
    lake = Lake(size, holes, start, goal)
    return lake if lake.has_path() else None


def outcomes(lake: Lake, cell: int, action: str, success_rate: float) -> list[tuple[float, int]]:
    """The cells that an action may lead to, with their probabilities."""
    index = ACTIONS.index(action)
    sides = [ACTIONS[index - 1], ACTIONS[(index + 1) % 4]]
    slip = (1 - success_rate) / 2
    return [(success_rate, lake.step(cell, action)), *((slip, lake.step(cell, side)) for side in sides)]


def best_values(lake: Lake, success_rate: float, num_actions: int) -> list[list[float]]:
    """The greatest probability to reach the goal from each cell, with 0, 1, ... `num_actions` actions left."""
    cells = range(lake.size**2)
    values = [[float(cell == lake.goal) for cell in cells]]
    for _ in range(num_actions):
        values.append([_best_value(lake, cell, success_rate, values[-1]) for cell in cells])
    return values


def best_action(lake: Lake, cell: int, success_rate: float, values: list[list[float]]) -> str:
    """The best action, given the values with 0, 1, ... actions left after it. Of equal ones, the best with fewer actions left."""
    return max(
        ACTIONS,
        key=lambda action: [round(_after(lake, cell, action, success_rate, then), 12) for then in reversed(values)],
    )


def _best_value(lake: Lake, cell: int, success_rate: float, then: list[float]) -> float:
    if lake.is_end(cell):
        return float(cell == lake.goal)
    return max(_after(lake, cell, action, success_rate, then) for action in ACTIONS)


def _after(lake: Lake, cell: int, action: str, success_rate: float, then: list[float]) -> float:
    """The expected value after an action."""
    return sum(chance * then[after] for chance, after in outcomes(lake, cell, action, success_rate))


class FrozenLake(BoardGame):
    """The model walks around holes to the goal: FrozenLake on `size` x `size` cells. `success_rate` below 1 makes the ice slippery."""

    name = "frozen_lake"
    actions = ACTIONS
    tile_layers = LAKE_TILES
    located = ("P", "G")

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.9,
        success_rate: float = 1.0,
        observation: ObservationKind = "grid",
        format: Format = "answer_tag",
        words: bool = True,
        max_turns: int = 5,
        max_actions: int = 10,
        max_actions_per_turn: int = 2,
        invalid_reward: float = -0.1,
    ) -> None:
        super().__init__(format, words, max_turns, max_actions, max_actions_per_turn, invalid_reward)
        check_whole(self.name, "size", size, least=2, most=16)
        check_number(self.name, "frozen", frozen, 0, 1)
        check_number(self.name, "success_rate", success_rate, 0, 1)
        check_observation(self.name, observation)
        self.size, self.frozen, self.success_rate, self.observation = size, frozen, success_rate, observation

    def reset(self, episode: Episode) -> None:
        def propose(dice: Dice) -> tuple[str, Lake] | None:
            lake = generate_lake(self.size, self.frozen, dice)
            return None if lake is None else (f"{self.name}\n{lake.text(lake.start)}", lake)

        self.lake = board_of_seed(self.name, episode.seed, split_of(episode), propose, (self.size, str(self.frozen)))
        self.player = self.lake.start
        self._slips = Dice(self.name, "slips", split_of(episode), episode.seed)

    def rules(self) -> str:
        slippery = (
            "The ice is slippery: sometimes you move to the left or to the right of the direction that you chose.\n"
            if self.success_rate < 1
            else ""
        )
        cells = "Cells: P you, _ ice, O hole, G goal."
        if self.observation == "picture":
            cells = "Cells: pale blue is ice, dark circles are holes, the green flag is the goal. You wear blue."
        return (
            "Frozen lake: walk over the ice to the goal. A step into a hole ends the game.\n"
            f"{cells}\n"
            f"{slippery}Actions: {', '.join(self.actions)}.\n"
            "Rewards: 1 for reaching the goal, otherwise 0."
        )

    def board(self) -> str:
        return self.lake.text(self.player)

    def details(self) -> str:
        if self.observation != "grid_coord":
            return ""
        holes = ", ".join(cell_name(cell, self.size) for cell in sorted(self.lake.holes)) or "none"
        return (
            "Coordinates (row, column), counted from (0, 0) at the top left: "
            f"you {cell_name(self.player, self.size)}; goal {cell_name(self.lake.goal, self.size)}; holes {holes}."
        )

    def move(self, action: str) -> float:
        chance = self._slips.unit()
        for probability, cell in outcomes(self.lake, self.player, action, self.success_rate):
            self.player = cell
            if chance < probability:
                break
            chance -= probability
        self.is_over = self.lake.is_end(self.player)
        self.is_solved = self.player == self.lake.goal
        return float(self.is_solved)

    def solution(self) -> list[str]:
        """The best actions for the actions that are left. On slippery ice it is one action, because the next depends on the slip."""
        values = best_values(self.lake, self.success_rate, self.actions_left)
        actions, cell = list[str](), self.player
        for left in range(self.actions_left, 0, -1):
            if self.lake.is_end(cell):
                break
            actions.append(best_action(self.lake, cell, self.success_rate, values[:left]))
            if self.success_rate < 1:
                break
            cell = self.lake.step(cell, actions[-1])
        return actions
