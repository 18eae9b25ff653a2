"""Sokoban: push boxes onto targets. The defaults are those of RAGEN: 6x6 cells, one box, at most 10 actions in 5 turns.

A board is made as in gym-sokoban: a random walk carves the floor, boxes start on their targets, and playing in reverse pulls them away. The
reverse play visits all reachable positions depth first and keeps the one of greatest (changes of the pulled box) x (distance of boxes from
their targets). Then the player takes up to three random steps. So every board has a solution; with the defaults, 99.8% of the train boards
(10,000 seeds) and 99.6% of the test boards (the 512 seeds of RAGEN) have one of at most 10 actions.

Rewards: -0.1 a step, +1 for a box onto a target, -1 for a box off a target, +10 when all boxes are on targets.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache

from burnish.data.tasks.task import Dice
from burnish.environments.base import Episode
from burnish.environments.games.board_pictures import SOKOBAN_TILES
from burnish.environments.games.boards import STEPS, BoardGame, ObservationKind, cell_name, check_observation
from burnish.environments.games.text_game import Format, board_of_seed, check_whole, choice, split_of

STEP_REWARD, ON_TARGET, OFF_TARGET, ALL_ON_TARGET = -0.1, 1.0, -1.0, 10.0
WALK_STEPS_PER_SIDE = 1.7
TURN_CHANCE = 0.35
MASKS = (
    ((1, 0), (1, 1), (1, 2)),
    ((0, 1), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 1)),
    ((1, 1), (1, 2), (2, 1)),
    ((1, 0), (1, 1), (2, 0), (2, 1)),
)
"""Cells that a step of the walk carves, in the 3x3 square around the player: a row, a column, two corners, and a 2x2 square."""
REVERSE_DEPTH = 300
REVERSE_STATES = 300_000
MAX_PLAYER_STEPS = 3


@dataclass(frozen=True)
class Room:
    """A square room. Cells are numbered row by row."""

    size: int
    floor: frozenset[int]
    targets: tuple[int, ...]

    @cached_property
    def moves(self) -> tuple[tuple[str, int], ...]:
        """Each action with the change of the cell number."""
        return tuple((name, row * self.size + column) for name, (row, column) in STEPS.items())

    def text(self, player: int, boxes: tuple[int, ...]) -> str:
        """The board: `#` wall, `_` floor, `O` target, `X` box, `√` box on target, `P` player, `S` player on target."""
        rows = []
        for row in range(self.size):
            cells = range(row * self.size, (row + 1) * self.size)
            rows.append("".join(self._symbol(cell, player, boxes) for cell in cells))
        return "\n".join(rows)

    def _symbol(self, cell: int, player: int, boxes: tuple[int, ...]) -> str:
        is_target = cell in self.targets
        if cell == player:
            return "S" if is_target else "P"
        if cell in boxes:
            return "√" if is_target else "X"
        if cell not in self.floor:
            return "#"
        return "O" if is_target else "_"

    def push(self, player: int, boxes: tuple[int, ...], change: int) -> tuple[int, tuple[int, ...]]:
        """The position after a step. A step against a wall, or against a box that cannot move, changes nothing."""
        cell = player + change
        if cell not in self.floor:
            return player, boxes
        if cell in boxes:
            behind = cell + change
            if behind not in self.floor or behind in boxes:
                return player, boxes
            boxes = tuple(behind if box == cell else box for box in boxes)
        return cell, boxes

    def is_solved(self, boxes: tuple[int, ...]) -> bool:
        return set(boxes) == set(self.targets)


Board = tuple[Room, int, tuple[int, ...]]
"""A room, the player's cell and the cells of the boxes."""


def generate_board(size: int, num_boxes: int, dice: Dice) -> Board | None:
    """One attempt at a board; None if the room is too small or no box can be pulled away from its target."""
    floor = _carve(size, dice)
    if len(floor) <= num_boxes + 1:
        return None
    free = sorted(floor)
    player = free.pop(dice.between(0, len(free) - 1))
    targets = tuple(free.pop(dice.between(0, len(free) - 1)) for _ in range(num_boxes))
    room = Room(size, floor, targets)
    player, boxes, displacement = reverse_play(room, player)
    if displacement == 0:
        return None
    return room, _wander(room, player, boxes, 0.8 if displacement == 1 else 0.5, dice), boxes


@lru_cache(maxsize=4096)  # all samples of a group play the same board, which takes most of a millisecond to make
def sokoban_board(size: int, num_boxes: int, seed: int, split: str) -> Board:
    """The board of a seed in a split."""

    def propose(dice: Dice) -> tuple[str, Board] | None:
        board = generate_board(size, num_boxes, dice)
        return None if board is None else (f"sokoban\n{board[0].text(*board[1:])}", board)

    return board_of_seed("sokoban", seed, split, propose, (size, num_boxes))


def _carve(size: int, dice: Dice) -> frozenset[int]:
    """The floor that a random walk over the inner cells carves."""
    row, column = dice.between(1, size - 1), dice.between(1, size - 1)
    directions = list(STEPS.values())
    step = choice(dice, directions)
    carved = set()
    for _ in range(int(WALK_STEPS_PER_SIDE * 2 * size)):
        if dice.unit() < TURN_CHANCE:
            step = choice(dice, directions)
        row = min(max(row + step[0], 1), size - 2)
        column = min(max(column + step[1], 1), size - 2)
        carved |= {(row - 1 + down, column - 1 + right) for down, right in choice(dice, MASKS)}
    return frozenset(r * size + c for r, c in carved if 0 < r < size - 1 and 0 < c < size - 1)


def reverse_play(room: Room, player: int) -> tuple[int, tuple[int, ...], int]:
    """Pull the boxes away from their targets; returns (player, boxes, total distance), or distance 0 if none can be pulled.

    A position counts only if all targets are visibly empty. Of equal positions, the first in depth-first order is taken.
    """
    targets, floor, size = room.targets, room.floor, room.size
    best_score, best = 0, (player, targets, 0)
    seen: set[tuple[int, frozenset[int]]] = set()
    stack = [(player, targets, -1, 0, REVERSE_DEPTH)]
    while stack:
        player, boxes, last_pulled, num_changes, depth = stack.pop()
        key = (player, frozenset(boxes))
        if key in seen or len(seen) >= REVERSE_STATES:
            continue
        seen.add(key)
        if num_changes and player not in targets and not any(box in targets for box in boxes):
            distance = sum(
                abs(box // size - target // size) + abs(box % size - target % size)
                for box, target in zip(boxes, targets, strict=True)
            )
            if num_changes * distance > best_score:
                best_score, best = num_changes * distance, (player, boxes, distance)
        if depth <= 1:
            continue
        for _, change in reversed(room.moves):
            cell = player + change
            if cell not in floor or cell in boxes:
                continue
            behind = player - change
            if behind in boxes:  # a player who steps away from a box pulls it along
                pulled = boxes.index(behind)
                moved = (*boxes[:pulled], player, *boxes[pulled + 1 :])
                stack.append((cell, moved, pulled, num_changes + (pulled != last_pulled), depth - 1))
            else:
                stack.append((cell, boxes, last_pulled, num_changes, depth - 1))
    return best


def _wander(room: Room, player: int, boxes: tuple[int, ...], chance: float, dice: Dice) -> int:
    """The player's cell after up to three random steps over free cells."""
    if dice.unit() >= chance:
        return player
    for _ in range(MAX_PLAYER_STEPS):
        free = [player + c for _, c in room.moves if player + c in room.floor and player + c not in boxes]
        if not free:
            break
        player = choice(dice, free)
        if dice.unit() >= 0.5:
            break
    return player


def shortest_solution(room: Room, player: int, boxes: tuple[int, ...]) -> list[str] | None:
    """The fewest actions that put all boxes on targets, by breadth-first search; None if there is no solution."""
    start = (player, tuple(sorted(boxes)))
    came_from: dict[tuple[int, tuple[int, ...]], tuple[tuple[int, tuple[int, ...]], str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if room.is_solved(state[1]):
            path = []
            while (step := came_from[state]) is not None:
                state, action = step
                path.append(action)
            return path[::-1]
        for name, change in room.moves:
            moved, pushed = room.push(*state, change)
            following = (moved, tuple(sorted(pushed)))
            if following not in came_from:
                came_from[following] = (state, name)
                queue.append(following)
    return None


class Sokoban(BoardGame):
    """The model pushes boxes onto targets: Sokoban on boards of `size` x `size` cells with `boxes` boxes."""

    name = "sokoban"
    actions = tuple(STEPS)
    tile_layers = SOKOBAN_TILES
    located = ("PS", "X√", "OS√")

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        observation: ObservationKind = "grid",
        format: Format = "answer_tag",
        words: bool = True,
        max_turns: int = 5,
        max_actions: int = 10,
        max_actions_per_turn: int = 2,
        invalid_reward: float = -0.1,
        border: bool = True,
    ) -> None:
        super().__init__(format, words, max_turns, max_actions, max_actions_per_turn, invalid_reward)
        check_whole(self.name, "size", size, least=5, most=12)
        check_whole(self.name, "boxes", boxes, least=1, most=4)
        check_observation(self.name, observation)
        self.size, self.num_boxes, self.observation, self.border = size, boxes, observation, border

    def reset(self, episode: Episode) -> None:
        board = sokoban_board(self.size, self.num_boxes, episode.seed, split_of(episode))
        self.room, self.player, self.boxes = board

    def rules(self) -> str:
        around = "" if self.border else "Walls that are not shown surround the room.\n"
        return (
            "Sokoban: you are the player, and every box has to stand on a target. Walking into a box pushes it one cell further, if the "
            "cell behind it is free. Boxes cannot be pulled, and two boxes cannot be pushed at once.\n"
            f"{self._cells_text()}\n"
            f"{around}Actions: {', '.join(self.actions)}.\n"
            "Rewards: -0.1 for each action, +1 for a box onto a target, -1 for a box off a target, +10 when all boxes are on targets."
        )

    def _cells_text(self) -> str:
        if self.observation == "picture":
            return "Cells: bricks are walls, red rings are targets, brown crates are boxes, a crate framed in green is on a target. You wear blue."
        return "Cells: # wall, _ floor, O target, X box, √ box on a target, P you, S you on a target."

    def board(self) -> str:
        text = self.room.text(self.player, self.boxes)
        return text if self.border else "\n".join(line[1:-1] for line in text.splitlines()[1:-1])

    def details(self) -> str:
        if self.observation != "grid_coord":
            return ""
        boxes, targets = (", ".join(map(self._shown_name, sorted(cells))) for cells in (self.boxes, self.room.targets))
        return (
            "Coordinates (row, column), counted from (0, 0) at the top left: "
            f"you {self._shown_name(self.player)}; boxes {boxes}; targets {targets}."
        )

    def _shown_name(self, cell: int) -> str:
        """The coordinates of a cell on the board as it is shown."""
        return cell_name(cell if self.border else cell - self.size - 1, self.size)

    def move(self, action: str) -> float:
        before = sum(box in self.room.targets for box in self.boxes)
        self.player, self.boxes = self.room.push(self.player, self.boxes, dict(self.room.moves)[action])
        gained = sum(box in self.room.targets for box in self.boxes) - before
        reward = STEP_REWARD + (ON_TARGET if gained > 0 else OFF_TARGET if gained < 0 else 0.0)
        if self.room.is_solved(self.boxes):
            self.is_over = self.is_solved = True
            reward += ALL_ON_TARGET
        return reward

    def solution(self) -> list[str]:
        return shortest_solution(self.room, self.player, self.boxes) or [self.actions[0]]
