"""2048, Countdown, Bandit and alphabet sort."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from burnish.config.errors import UserError
from burnish.data.tasks.arithmetic import evaluate_expression
from burnish.data.tasks.task import Dice
from burnish.environments.base import End, Episode, Observation
from burnish.environments.games.alphabet_sort import AlphabetSort, names_of_split, score_turn, similarity
from burnish.environments.games.bandit import PAIRS, Bandit
from burnish.environments.games.countdown import CountdownGame, solve
from burnish.environments.games.game_2048 import Game2048, add_tile, legal_moves, slide, slide_line
from burnish.environments.games.propose_sum import SOLVERS, ProposeSum
from tests.environments.games.transcripts import answer, episode, now, row_episode, tagged, total_reward, transcript

# --- 2048 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "after", "gained"),
    [
        ((0, 2, 0, 2), (4, 0, 0, 0), 4),
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),  # a tile merges once a move
        ((2, 4, 8, 16), (2, 4, 8, 16), 0),
        ((0, 0, 0, 0), (0, 0, 0, 0), 0),
    ],
)
def test_a_line_slides_and_merges_from_its_front(line: tuple, after: tuple, gained: int) -> None:
    assert slide_line(line) == (after, gained)


def test_moves_slide_in_their_direction() -> None:
    board = (2, 0, 0, 2, 0, 0, 0, 0, 0, 4, 0, 0, 2, 0, 0, 8)
    assert slide(board, "Left") == ((4, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 2, 8, 0, 0), 4)
    assert slide(board, "Right") == ((0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 2, 8), 4)
    assert slide(board, "Up") == ((4, 4, 0, 2, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0), 4)
    assert slide(board, "Down") == ((0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 4, 4, 0, 8), 4)


def game_2048(*tiles: int, **options: int) -> Game2048:
    game = Game2048(**options)
    now(game.start(episode()))
    game.tiles = tiles
    return game


def test_a_move_pays_the_logarithm_of_what_it_merged_and_adds_one_tile() -> None:
    game = game_2048(2, 2, 4, 4, *[0] * 12)
    assert game.move("Left") == pytest.approx(0.1 * math.log2(12 + 1))
    assert sorted(game.tiles)[:-3] == [0] * 13
    assert sum(game.tiles) in (14, 16)
    before = game_2048(2, 4, *[0] * 14)
    assert before.move("Left") == 0.0
    assert before.tiles == (2, 4, *[0] * 14)


def test_the_game_is_over_when_no_move_changes_the_board_and_solved_at_the_goal() -> None:
    stuck = (2, 4, 2, 4, 4, 2, 4, 2, 2, 4, 2, 4, 4, 2, 4, 2)
    assert legal_moves(stuck) == []
    last = game_2048(
        0, 8, 16, 32, 4, 2, 4, 8, 2, 4, 2, 4, 4, 2, 4, 2
    )  # the new 2 or 4 fills the last free cell and fits nowhere
    assert last.move("Left") == 0.0
    assert (last.is_over, last.is_solved) == (True, False)
    won = game_2048(8, 8, *[0] * 14, goal=16)
    won.move("Right")
    assert (won.is_over, won.is_solved) == (True, True)


def test_nine_of_ten_new_tiles_are_twos_and_two_tiles_begin() -> None:
    dice = Dice("test")
    fours = sum(4 in add_tile((0,) * 16, dice) for _ in range(2000))
    assert 160 < fours < 240
    game = Game2048()
    now(game.start(episode()))
    assert sum(tile > 0 for tile in game.tiles) == 2


def test_the_greedy_player_plays_until_nothing_moves() -> None:
    end = transcript("game_2048", episode(), "best", max_turns=1000)[-1]
    assert isinstance(end, End)
    assert (end.success, end.metrics["invalid_turns"]) == (False, 0.0)
    tiles = tuple(int(tile) for tile in str(end.text).split())
    assert (max(tiles) >= 64, legal_moves(tiles)) == (True, [])


# --- Countdown --------------------------------------------------------------------------------------------------------------


def problem(numbers: list[int], target: int) -> Episode:
    return Episode("countdown/0", 0, "", target, {"numbers": numbers})


def test_the_solver_agrees_with_trying_all_expressions_of_three_numbers() -> None:
    rng = random.Random(0)
    for _ in range(60):
        numbers, target = [rng.randint(1, 9) for _ in range(3)], rng.randint(1, 40)
        shapes = ("({0}{3}{1}){4}{2}", "{0}{3}({1}{4}{2})")
        results = (
            evaluate_expression(shape.format(*order, *signs))
            for order in itertools.permutations(numbers)
            for signs in itertools.product("+-*/", repeat=2)
            for shape in shapes
        )
        is_solvable = any(result is not None and result[0] == target for result in results)
        found = solve(numbers, target)
        assert (found is not None) == is_solvable
        if found is not None:
            value, used = evaluate_expression(found) or (None, [])
            assert (value, sorted(used)) == (target, sorted(numbers))
    assert solve([3, 3, 8, 8], 24) == "8 / (3 - (8 / 3))"


def test_a_wrong_try_is_answered_by_its_value_and_a_right_one_pays_one() -> None:
    game = CountdownGame()
    start = now(game.start(problem([3, 5, 2], 4)))
    assert "Target: 4, nums: [3, 5, 2]" in start.messages[0]["content"]  # type: ignore[index]
    replies = {
        "2 + 5 + 3": "The value is 10, not 4.",
        "2 * 2": "Wrong numbers: use each of 3, 5, 2 exactly once. The value was 4.",
        "__import__('os')": "Invalid answer: expected one expression",
        "5 / 3 / 2": "The value is 5/6, not 4.",
    }
    for tried, said in replies.items():
        seen = now(game.step(tagged(tried)))
        assert isinstance(seen, Observation)
        assert seen.messages[0]["content"].startswith(said)  # type: ignore[index]
        assert seen.reward == 0.0
    assert seen.state == "3, 5, 2 to 4; last 5/6"
    end = now(game.step(tagged("2 + 5 - 3 = 4")))
    assert isinstance(end, End)
    assert (end.reward, end.success, end.metrics) == (1.0, True, {"tries": 5.0, "invalid_turns": 1.0})


@pytest.mark.parametrize(
    ("last", "reward"), [("3 + 5 + 2", 0.1), ("3 + 5", 0.0), ("4", 0.0), ("9**9**9**9", 0.0), ("1+" * 5000 + "1", 0.0)]
)
def test_the_last_try_with_the_right_numbers_pays_a_tenth(last: str, reward: float) -> None:
    game = CountdownGame(max_turns=2)
    now(game.start(problem([3, 5, 2], 4)))
    now(game.step(tagged("3 - 5 - 2")))
    end = now(game.step(tagged(last)))
    assert isinstance(end, End)
    assert (end.reward, end.success) == (reward, False)


def test_a_cut_off_try_is_invalid_and_huge_values_are_not_shown() -> None:
    game = CountdownGame(format="last_word")
    now(game.start(problem([3, 5, 2], 4)))
    seen = now(game.step(answer("5 + 2 - 3", "length")))
    assert isinstance(seen, Observation)
    assert seen.messages[0]["content"].startswith("Invalid")  # type: ignore[index]
    seen = now(game.step(answer("so I say:\n" + "*".join(["99999999"] * 20))))
    assert isinstance(seen, Observation)
    assert "The value was too long to show." in seen.messages[0]["content"]  # type: ignore[index]
    assert isinstance(now(game.step(answer("I try\n5 + 2 - 3"))), End)


def test_the_rows_of_the_task_are_solved_by_the_best_player() -> None:
    for index in range(30):
        assert total_reward(transcript("countdown", row_episode("countdown", "test", index), "best")) == 1.0


def test_a_row_without_a_problem_is_refused() -> None:
    with pytest.raises(UserError, match="expected rows of the task countdown"):
        now(CountdownGame().start(episode()))


# --- Bandit -----------------------------------------------------------------------------------------------------------------


def test_names_are_disjoint_and_as_many_as_published() -> None:
    train, test = ({name for pair in PAIRS[split] for name in pair} for split in ("train", "test"))
    assert (len(PAIRS["train"]), len(PAIRS["test"]), len(train), len(test)) == (12, 8, 24, 16)
    assert not train & test


def test_arms_pay_what_is_stated() -> None:
    rewards: dict[str, list[float]] = {"steady": [], "bold": []}
    orders = set()
    for seed in range(800):
        for arm in rewards:
            game = Bandit()
            now(game.start(episode(seed)))
            end = now(game.step(tagged(getattr(game, arm).upper())))
            assert isinstance(end, End)
            assert end.success == (arm == "bold")
            rewards[arm].append(end.reward or 0.0)
        orders.add((game.bold, game.actions.index(game.bold)))
    assert set(rewards["steady"]) == {0.1}
    assert set(rewards["bold"]) == {0.0, 1.0}
    assert sum(rewards["bold"]) / 800 == pytest.approx(0.25, abs=0.05)
    assert len(orders) == 24
    assert transcript("bandit", episode(), "best")[-1].success is True  # type: ignore[union-attr]


def test_no_arm_costs_a_tenth() -> None:
    game = Bandit()
    now(game.start(episode()))
    end = now(game.step(tagged("both")))
    assert isinstance(end, End)
    assert (end.reward, end.success) == (-0.1, False)


# --- Alphabet sort ----------------------------------------------------------------------------------------------------------


def test_names_of_the_splits_are_disjoint() -> None:
    (first, last), (first_test, last_test) = names_of_split("train"), names_of_split("test")
    assert not set(first) & set(first_test)
    assert not set(last) & set(last_test)
    assert min(len(first_test), len(last_test)) >= 36


def test_lists_are_sorted_and_mark_the_new_names() -> None:
    game = AlphabetSort(min_turns=2, max_turns=2)
    now(game.start(episode()))
    game.lists, game.by = [[("Zoe", "Adler"), ("Ada", "Young")], [("Max", "Blake")]], "LAST"
    assert game.right_list() == "ZoeAdler\nAdaYoung"
    seen = now(game.step(answer("<alphabetical_sorted>\nzoeadler\n  AdaYoung\n</alphabetical_sorted>")))
    assert isinstance(seen, Observation)
    assert seen.messages[0]["content"].endswith("\n\nMaxBlake")  # type: ignore[index]
    assert game.right_list() == "ZoeAdler\nMaxBlake // new name!\nAdaYoung"
    wrong = "<combined_alphabetical_sorted>\nZoeAdler\nMaxBlake\nAdaYoung\n</combined_alphabetical_sorted>"
    end = now(game.step(answer(wrong)))
    ratio = 2 * 26 / (26 + 39)  # 26 characters match, of 26 and 39
    assert isinstance(end, End)
    assert end.reward == pytest.approx((1 + ratio**4) / 2)
    assert (end.success, end.metrics) == (False, {"similarity": pytest.approx((1 + ratio) / 2)})


def test_the_power_of_the_mean_is_applied_once() -> None:
    game = AlphabetSort(min_turns=2, max_turns=2, power=8, power_of="mean")
    now(game.start(episode()))
    now(game.step(answer(game.best_answer())))
    end = now(game.step(answer("no list")))
    assert isinstance(end, End)
    assert end.reward == pytest.approx(0.5**8)


def test_several_lists_count_only_if_each_is_better() -> None:
    def lists(*texts: str) -> str:
        return "".join(f"<x>{text}</x>" for text in texts)

    assert score_turn(lists("ab"), "x", "ab") == 1.0
    assert score_turn(lists("b", "ab"), "x", "ab") == 1.0
    assert score_turn(lists("ab", "ab"), "x", "ab") == 0.0
    assert score_turn(lists("ab", "b"), "x", "ab") == 0.0
    assert score_turn("ab", "x", "ab") == 0.0
    assert similarity("a" * 100_000, "ab") == 0.0


def test_the_best_player_is_always_right_and_turns_and_names_stay_in_their_ranges() -> None:
    sizes = set()
    for seed in range(60):
        seen = transcript("alphabet_sort", episode(seed), "best")
        assert (total_reward(seen), seen[-1].success) == (1.0, True)  # type: ignore[union-attr]
        game = AlphabetSort()
        now(game.start(episode(seed)))
        sizes.add((len(game.lists), max(map(len, game.lists))))
        names = [name for part in game.lists for name in part]
        assert len({a for a, _ in names}) == len({b for _, b in names}) == len(names)
    assert ({turns for turns, _ in sizes}, {names for _, names in sizes}) == ({1, 2, 3}, {1, 2, 3, 4, 5})


def test_an_episode_that_is_ended_early_scores_its_missing_turns_as_zero() -> None:
    game = AlphabetSort(min_turns=2, max_turns=2)
    now(game.start(episode()))
    now(game.step(answer(game.best_answer())))
    assert now(game.end("length")).reward == 0.5


def test_a_proposed_sum_pays_the_proposer_for_what_some_solvers_get_wrong() -> None:
    def end_of(*answers: str) -> End:
        game = ProposeSum(format="last_word")
        seen = now(game.start(row_episode("propose_sum", "train", 0)))
        assert seen.role == "proposer"
        asked = list[str]()
        for text in answers:
            seen = now(game.step(answer(text)))
            asked += [seen.role] if isinstance(seen, Observation) else []
        assert isinstance(seen, End)
        assert asked == list(SOLVERS[: len(asked)])
        return seen

    game = ProposeSum(format="last_word")
    now(game.start(row_episode("propose_sum", "train", 0)))
    proposal = game.best_answer()
    assert game.is_valid(proposal)
    assert not game.is_valid("0" + proposal)
    assert not game.is_valid(proposal[:-1] + "\u0663")  # an Arabic digit
    right = str(sum(map(int, proposal.split("+"))))
    for num_right, worth in ((0, 0.0), (1, 0.75), (2, 0.5), (4, 0.0)):
        end = end_of(proposal, *([right] * num_right + ["0"] * (4 - num_right)))
        expected = {"proposer": worth} | {role: float(k < num_right) for k, role in enumerate(SOLVERS)}
        assert end.rewards == expected
        assert end.metrics == {"valid_proposals": 1.0, "solver_accuracy": num_right / 4}
    refused = end_of("no sum")
    assert refused.metrics == {"valid_proposals": 0.0}
    assert refused.rewards == {"proposer": -0.5} | dict.fromkeys(SOLVERS, 0.0)
