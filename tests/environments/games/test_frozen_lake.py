from __future__ import annotations

import numpy as np
import pytest

from burnish.environments.base import End, Observation
from burnish.environments.games.frozen_lake import ACTIONS, FrozenLake, Lake, best_action, best_values, outcomes
from tests.environments.games.transcripts import episode, now, tagged, transcript

LAKE = Lake(4, frozenset({5, 7, 11, 12}), 0, 15)
"""The 4x4 map of gymnasium."""


def optimal_success(lake: Lake, success_rate: float, horizon: int) -> float:
    """The best probability to reach the goal, by value iteration on transition matrices that do not use the game's code."""
    size, num = lake.size, lake.size**2
    deltas = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
    sides = {"Left": ("Up", "Down"), "Right": ("Up", "Down"), "Up": ("Left", "Right"), "Down": ("Left", "Right")}
    matrices = []
    for action in deltas:
        matrix = np.zeros((num, num))
        for cell in range(num):
            if cell in lake.holes or cell == lake.goal:
                matrix[cell, cell] = 1
                continue
            for way, chance in ((action, success_rate), *((s, (1 - success_rate) / 2) for s in sides[action])):
                row = min(max(cell // size + deltas[way][0], 0), size - 1)
                column = min(max(cell % size + deltas[way][1], 0), size - 1)
                matrix[cell, row * size + column] += chance
        matrices.append(matrix)
    values = np.eye(num)[lake.goal]
    for _ in range(horizon):
        values = np.max([matrix @ values for matrix in matrices], axis=0)
    return float(values[lake.start])


@pytest.mark.parametrize("success_rate", [1.0, 0.8, 1 / 3])
def test_best_values_are_those_of_value_iteration_and_of_play(success_rate: float) -> None:
    exact = optimal_success(LAKE, success_rate, 10)
    values = best_values(LAKE, success_rate, 10)
    assert values[10][0] == pytest.approx(exact, abs=1e-12)
    policy = {
        (left, cell): best_action(LAKE, cell, success_rate, values[:left])
        for left in range(1, 11)
        for cell in range(16)
        if not LAKE.is_end(cell)
    }
    game, num_solved, num_games = FrozenLake(success_rate=success_rate), 0, 1000
    for seed in range(num_games):
        game.reset(episode(seed))
        game.lake, game.player, game.is_over, game.is_solved = LAKE, 0, False, False
        for left in range(10, 0, -1):
            game.move(policy[left, game.player])
            if game.is_over:
                break
        num_solved += game.is_solved
    assert num_solved / num_games == pytest.approx(exact, abs=3.5 * (exact * (1 - exact) / num_games) ** 0.5 + 1e-12)


def test_the_slippery_lake_of_gymnasium_is_a_success_rate_of_a_third() -> None:
    assert outcomes(LAKE, 14, "Right", 1 / 3) == [
        (1 / 3, 15),
        (pytest.approx(1 / 3), 14),
        (pytest.approx(1 / 3), 10),
    ]


def test_boards_have_a_path_and_the_stated_share_of_frozen_cells() -> None:
    holes = 0
    for seed in range(500):
        game = FrozenLake()
        game.reset(episode(seed))
        lake = game.lake
        assert lake.start != lake.goal
        assert not {lake.start, lake.goal} & lake.holes
        assert optimal_success(lake, 1.0, 15) == 1 if seed < 100 else True
        holes += len(lake.holes)
    assert 0.085 < holes / 7_000 < 0.11


def test_the_goal_pays_one_and_a_hole_ends_the_game() -> None:
    game = FrozenLake()
    now(game.start(episode()))
    game.lake, game.player = LAKE, 14
    assert game.board() == "____\n_O_O\n___O\nO_PG"
    end = now(game.step(tagged("Right || Left")))
    assert isinstance(end, End)
    assert (end.reward, end.success, end.text) == (1.0, True, "____\n_O_O\n___O\nO__√")
    now(game.start(episode()))
    game.lake, game.player = LAKE, 10
    end = now(game.step(tagged("Right")))
    assert isinstance(end, End)
    assert (end.reward, end.success, end.text) == (0.0, False, "____\n_O_O\n___X\nO__G")


def test_the_border_stops_a_step_and_the_observation_counts_down() -> None:
    game = FrozenLake(observation="grid_coord")
    now(game.start(episode()))
    game.lake, game.player = LAKE, 0
    seen = now(game.step(tagged("Left || Up")))
    assert isinstance(seen, Observation)
    text = seen.messages[0]["content"]  # type: ignore[index]
    assert (seen.reward, seen.state) == (0.0, "P___\n_O_O\n___O\nO__G")
    assert "you (0, 0); goal (3, 3); holes (1, 1), (1, 3), (2, 3), (3, 0)." in text
    assert "8 actions left" in text


def test_the_best_player_takes_a_shortest_path() -> None:
    for seed in range(10_000, 10_030):
        seen = transcript("frozen_lake", episode(seed), "best")
        game = FrozenLake()
        game.reset(episode(seed))
        shortest = next(k for k in range(1, 16) if optimal_success(game.lake, 1.0, k) == 1)
        end = seen[-1]
        assert isinstance(end, End)
        assert (end.success, end.metrics["actions"]) == ((True, shortest) if shortest <= 10 else (False, 10))


def test_samples_of_a_seed_slip_alike() -> None:
    def walk(seed: int) -> list[int]:
        game, cells = FrozenLake(success_rate=0.5, frozen=1.0), []
        game.reset(episode(seed))
        for index in range(10):
            game.move(ACTIONS[index % 4])
            cells.append(game.player)
        return cells

    assert walk(3) == walk(3)
    assert walk(3) != walk(4)
