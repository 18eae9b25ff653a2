from __future__ import annotations

from collections import deque

import pytest

from burnish.data.tasks.task import Dice
from burnish.environments.base import End, Observation
from burnish.environments.games.sokoban import Room, Sokoban, generate_board, reverse_play, shortest_solution
from tests.environments.games.transcripts import answer, episode, now, tagged, total_reward, transcript

STEPS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


def solution_length(board: str) -> int | None:
    """The fewest actions for a board given as text, written again independently of the game's code."""
    cells = {(r, c): symbol for r, line in enumerate(board.split("\n")) for c, symbol in enumerate(line)}
    free = {cell for cell, symbol in cells.items() if symbol != "#"}
    targets = {cell for cell, symbol in cells.items() if symbol in "O√S"}
    player = next(cell for cell, symbol in cells.items() if symbol in "PS")
    boxes = frozenset(cell for cell, symbol in cells.items() if symbol in "X√")
    distance, queue = {(player, boxes): 0}, deque([(player, boxes)])
    while queue:
        (r, c), boxes = state = queue.popleft()
        if boxes == targets:
            return distance[state]
        for down, right in STEPS.values():
            to, behind = (r + down, c + right), (r + 2 * down, c + 2 * right)
            if to not in free or (to in boxes and (behind in boxes or behind not in free)):
                continue
            following = (to, boxes - {to} | {behind} if to in boxes else boxes)
            if following not in distance:
                distance[following] = distance[state] + 1
                queue.append(following)
    return None


def on_board(text: str, **options: object) -> Sokoban:
    """A game on a board given as text."""
    game = Sokoban(**options)  # type: ignore[arg-type]
    now(game.start(episode()))
    lines = text.split()
    size = len(lines)
    cells = dict(enumerate("".join(lines)))
    floor = frozenset(cell for cell, symbol in cells.items() if symbol != "#")
    game.room = Room(size, floor, tuple(cell for cell, symbol in cells.items() if symbol in "O√S"))
    game.player = next(cell for cell, symbol in cells.items() if symbol in "PS")
    game.boxes = tuple(cell for cell, symbol in cells.items() if symbol in "X√")
    assert game.board() == "\n".join(lines)
    return game


CORRIDOR = "######\n#PX_O#\n#____#\n######\n######\n######"


def test_the_512_test_boards_are_solvable_and_510_of_them_in_ten_actions() -> None:
    lengths = []
    for seed in range(123, 635):
        game = Sokoban()
        game.reset(episode(seed, "test"))
        lengths.append(len(shortest_solution(game.room, game.player, game.boxes) or []))
        if seed < 183:
            assert lengths[-1] == solution_length(game.board())
    assert min(lengths) == 1
    assert sum(length <= 10 for length in lengths) == 510


def test_boards_have_walls_around_one_player_one_box_and_one_target() -> None:
    for seed in range(200):
        game = Sokoban()
        game.reset(episode(seed))
        lines = game.board().split("\n")
        assert [len(line) for line in lines] == [6] * 6
        assert lines[0] == lines[-1] == "######"
        assert all(line[0] == line[-1] == "#" for line in lines)
        inside = "".join(lines)
        assert sum(map(inside.count, "PS")) == sum(map(inside.count, "X")) == sum(map(inside.count, "OS")) == 1


def test_reverse_play_finds_the_greatest_distance_that_pulls_can_reach() -> None:
    num_found = 0
    for seed in range(150):
        board = generate_board(6, 1, Dice("test", seed))
        if board is None:
            continue
        room = board[0]
        start = min(room.floor - set(room.targets))
        target = room.targets[0]
        reached, edge = {(start, target)}, [(start, target)]
        while edge:
            player, box = edge.pop()
            for down, right in STEPS.values():
                change = 6 * down + right
                to = player + change
                if to not in room.floor or to == box:
                    continue
                state = (to, player if box == player - change else box)
                if state not in reached:
                    reached.add(state)
                    edge.append(state)
        distances = [
            abs(box // 6 - target // 6) + abs(box % 6 - target % 6) for player, box in reached if player != target
        ]
        assert reverse_play(room, start)[2] == max(distances, default=0)
        num_found += 1
    assert num_found > 100


def test_rewards_of_steps_pushes_and_the_end() -> None:
    game = on_board(CORRIDOR)
    assert game.move("Up") == pytest.approx(-0.1)  # into the wall
    assert game.board() == CORRIDOR
    assert game.move("Right") == pytest.approx(-0.1)
    assert game.board().split("\n")[1] == "#_PXO#"
    assert game.move("Right") == pytest.approx(-0.1 + 1 + 10)
    assert (game.board().split("\n")[1], game.is_over, game.is_solved) == ("#__P√#", True, True)


def test_a_box_off_its_target_costs_one_and_two_boxes_do_not_move() -> None:
    game = on_board("######\n#P√__#\n#_X__#\n#_O__#\n######\n######", boxes=2)
    assert game.move("Right") == pytest.approx(-0.1 - 1)
    game = on_board("######\n#PXX_#\n#_OO_#\n#____#\n######\n######", boxes=2)
    assert game.move("Right") == pytest.approx(-0.1)
    assert game.board().split("\n")[1] == "#PXX_#"


def test_a_player_on_a_target_is_shown_and_the_target_comes_back() -> None:
    game = on_board("######\n#PO__#\n#__X_#\n#____#\n######\n######")
    game.move("Right")
    assert game.board().split("\n")[1] == "#_S__#"
    game.move("Right")
    assert game.board().split("\n")[1] == "#_OP_#"


def test_answers_play_two_actions_a_turn_and_ten_in_all() -> None:
    game = on_board(CORRIDOR)
    seen = now(game.step(tagged("Down || down || Up")))
    assert isinstance(seen, Observation)
    assert seen.reward == pytest.approx(-0.2)
    assert seen.state == "######\n#_X_O#\n#P___#\n######\n######\n######"
    text = seen.messages[0]["content"]  # type: ignore[index]
    assert text.startswith("Reward: -0.2\n\nTurn 2:\nState:\n######\n")
    assert "8 actions left, at most 2 in this turn" in text
    for _ in range(3):
        seen = now(game.step(tagged("Down || Down")))
    end = now(game.step(tagged("Down || Down")))
    assert isinstance(end, End)
    assert (end.reward, end.success) == (pytest.approx(-0.2), False)
    assert end.metrics == {"actions": 10.0, "invalid_turns": 0.0}


def test_invalid_names_are_skipped_and_cost_once_a_turn() -> None:
    game = on_board(CORRIDOR)
    seen = now(game.step(tagged("Jump || Right")))
    assert isinstance(seen, Observation)
    assert seen.reward == pytest.approx(-0.2)
    assert "#_PXO#" in str(seen.state)
    assert "expected actions out of Up, Down, Left, Right" in seen.messages[0]["content"]  # type: ignore[index]
    for nothing in (answer("Right"), tagged(""), answer("<answer>Right</answer>", "length")):
        seen = now(game.step(nothing))
        assert isinstance(seen, Observation)
        assert seen.reward == pytest.approx(-0.1)
        assert "#_PXO#" in str(seen.state)
    end = now(game.step(tagged("Right || Right")))
    assert isinstance(end, End)
    assert (end.reward, end.success) == (pytest.approx(10.9), True)
    assert end.metrics == {"actions": 2.0, "invalid_turns": 4.0}


def test_the_best_player_solves_every_board_within_the_limits_and_earns_the_published_reward() -> None:
    for seed in range(123, 163):
        seen = transcript("sokoban", episode(seed, "test"), "best")
        length = solution_length(str(seen[0].state))  # type: ignore[union-attr]
        assert length is not None
        assert isinstance(seen[-1], End)
        assert seen[-1].success == (length <= 10)
        if length <= 10:
            assert total_reward(seen) == pytest.approx(11 - 0.1 * length)
            assert len(seen) - 1 == (length + 1) // 2


def test_coordinates_name_the_cells_of_the_grid() -> None:
    game = on_board(CORRIDOR, observation="grid_coord")
    assert game.details().endswith("you (1, 1); boxes (1, 2); targets (1, 4).")
    assert "(1, 1)" not in game.board()


def test_a_board_without_its_border_is_the_inner_board_and_plays_the_same() -> None:
    whole, inner = (
        Sokoban(size=5, border=border, format="last_word", observation="grid_coord") for border in (True, False)
    )
    for game in (whole, inner):
        now(game.start(episode(3)))
    lines = whole.board().split("\n")
    assert set(lines[0] + lines[-1]) | {line[side] for line in lines for side in (0, -1)} == {"#"}
    assert inner.board().split("\n") == [line[1:-1] for line in lines[1:-1]]
    assert [inner.solution(), inner.rules().count("not shown")] == [whole.solution(), 1]
    for text in whole.solution():
        ends = [now(game.step(answer(text))) for game in (whole, inner)]
        assert ends[0].reward == ends[1].reward
    assert whole.is_solved
    assert inner.is_solved
    game = on_board(CORRIDOR, observation="grid_coord")
    game.border = False
    assert game.board() == "PX_O\n____\n####\n####"
    assert game.details().endswith("you (0, 0); boxes (0, 1); targets (0, 3).")
