"""The simulator of a gripper, and the game of action codes on it."""

from __future__ import annotations

import pytest

from burnish.data.codes import read_codes, write_codes
from burnish.environments.base import End, Observation
from burnish.environments.games.tabletop import Table, Tabletop, movement, movement_code, state_codes
from tests.environments.games.transcripts import answer, now, row_episode, transcript


def test_the_gripper_takes_a_block_in_reach_and_leaves_it_where_it_opens() -> None:
    table = Table(gripper=(0.5, 0.5), block=(0.55, 0.5), goal=(0.9, 0.5))
    held = table.after(0.2, 0.0, closes=True)
    assert held.is_holding
    assert held.block == held.gripper == (0.7, 0.5)
    carried = held.after(0.25, 0.0, closes=True)
    assert carried.gripper == (0.95, 0.5)
    assert not carried.is_solved  # the gripper is closed
    left = carried.after(0.0, 0.0, closes=False)
    assert left.is_solved
    assert left.block == (0.95, 0.5)


def test_a_gripper_that_closed_too_far_away_must_open_again() -> None:
    table = Table(gripper=(0.1, 0.5), block=(0.3, 0.5), goal=(0.9, 0.9)).after(0.2, 0.0, closes=True)
    assert not table.is_holding
    assert not table.after(0.0, 0.0, closes=True).is_holding
    assert table.after(0.0, 0.0, closes=False).after(0.0, 0.0, closes=True).is_holding


def test_the_table_has_an_edge() -> None:
    assert Table((0.9, 0.1), (0.5, 0.5), (0.2, 0.2)).after(0.25, -0.25, closes=False).gripper == (1.0, 0.0)


@pytest.mark.parametrize("bins", [8, 16, 253])
def test_a_code_stands_for_the_middle_of_its_part(bins: int) -> None:
    distances = [movement(code, bins) for code in range(bins)]
    assert [movement_code(distance, bins) for distance in distances] == list(range(bins))
    assert distances[0] == -distances[-1]
    assert movement_code(-9.0, bins) == 0
    assert movement_code(9.0, bins) == bins - 1


def test_the_best_player_always_succeeds_and_is_rewarded_once() -> None:
    for index in range(40):
        seen = transcript("tabletop", row_episode("tabletop", "test", index), "best")
        end = seen[-1]
        assert isinstance(end, End)
        assert (end.reward, end.success) == (1.0, True)
        assert all(part.reward == 0 for part in seen[:-1])


def test_the_model_reads_where_things_are_from_the_gripper() -> None:
    assert state_codes(Table((0.0, 1.0), (0.0, 1.0), (0.99, 0.01), True, True), 16) == [8, 8, 15, 0, 18]
    game = Tabletop()
    seen = now(game.start(row_episode("tabletop", "train", 0)))
    assert isinstance(seen, Observation)
    assert seen.messages is not None
    assert read_codes(seen.messages[0]["content"]) == state_codes(game.table, 32)


@pytest.mark.parametrize("wrong", ["", "up", write_codes([0] * 5), write_codes([0] * 7), write_codes([0] * 5 + [32])])
def test_an_answer_that_is_no_chunk_of_actions_moves_nothing(wrong: str) -> None:
    game = Tabletop(max_turns=2)
    now(game.start(row_episode("tabletop", "train", 0)))
    before = game.table
    now(game.step(answer(wrong)))
    assert game.table == before
    end = now(game.step(answer(write_codes([31, 31, 0] * 2))))
    assert isinstance(end, End)
    assert end.metrics == {"actions": 2.0, "invalid_turns": 1.0}
