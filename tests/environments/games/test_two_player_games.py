"""Tic-tac-toe against exact minimax, and Kuhn poker against its known value and equilibria."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from burnish.environments.base import End, Observation
from burnish.environments.games.kuhn_poker import (
    DEALS,
    INFORMATION_SETS,
    KuhnPoker,
    best_response,
    equilibrium,
    expected_value,
    exploitability,
)
from burnish.environments.games.tic_tac_toe import (
    EMPTY,
    TicTacToe,
    TicTacToeSelfPlay,
    best_cells,
    free_cells,
    minimax,
    play,
    read_cell,
    winner,
)
from tests.environments.games.transcripts import answer, episode, now, tagged, transcript


def results_against_all(board: str, side: str) -> set[str | None]:
    """All winners that can come out when `side` plays any best cell and the other side plays anything."""
    if winner(board) is not None or not free_cells(board):
        return {winner(board)}
    is_ours = (board.count("X") == board.count("O")) == (side == "X")
    cells = best_cells(board) if is_ours else free_cells(board)
    return set().union(*(results_against_all(play(board, cell), side) for cell in cells))


def test_minimax_never_loses_and_draws_against_itself() -> None:
    assert minimax(EMPTY) == 0
    assert results_against_all(play(EMPTY, 4), "X") == {"X", None}
    assert all("X" not in results_against_all(play(EMPTY, cell), "O") for cell in (0, 1, 4))
    board = EMPTY
    while winner(board) is None and free_cells(board):
        board = play(board, best_cells(board)[-1])
    assert winner(board) is None


def test_minimax_takes_a_win_and_blocks_a_loss() -> None:
    assert best_cells("XX.OO....") == [2]
    assert best_cells("XX..O....") == [2]
    assert (minimax("XX.OO...."), minimax("XOX.O....")) == (1, 0)


def test_all_5478_boards_have_a_value_that_agrees_with_the_definition() -> None:
    boards, edge = {EMPTY}, [EMPTY]
    while edge:
        board = edge.pop()
        if winner(board) is None:
            for after in {play(board, cell) for cell in free_cells(board)} - boards:
                boards.add(after)
                edge.append(after)
    assert len(boards) == 5478
    for board in boards:
        after = [-minimax(play(board, cell)) for cell in free_cells(board)] if winner(board) is None else []
        assert minimax(board) == (-1 if winner(board) else max(after, default=0))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("4", 4),
        ("cell 4", 4),
        ("1 2", 5),
        ("(2, 0)", 6),
        ("9", None),
        ("0", None),
        ("1 2 3", None),
        ("12", None),
        ("", None),
    ],
)
def test_cells_are_read_by_number_or_by_row_and_column(text: str, cell: int | None) -> None:
    assert read_cell(text, "X........") == cell


def test_the_best_player_draws_against_minimax_and_beats_a_random_opponent_often() -> None:
    ends = [transcript("tic_tac_toe", episode(seed), "best")[-1] for seed in range(40)]
    assert {(end.reward, end.success) for end in ends} == {(0.0, True)}  # type: ignore[union-attr]
    wins = [transcript("tic_tac_toe", episode(seed), "best", opponent="random")[-1] for seed in range(40)]
    assert {end.reward for end in wins} == {0.0, 1.0}
    assert all(end.success == (end.reward == 1.0) for end in wins)  # type: ignore[union-attr]
    assert sum(end.reward == 1.0 for end in wins) > 25
    assert transcript("tic_tac_toe", episode(0), "best", draw_reward=0.5)[-1].reward == 0.5


def test_minimax_as_an_opponent_never_loses() -> None:
    ends = [transcript("tic_tac_toe", episode(seed))[-1] for seed in range(60)]
    assert {end.reward for end in ends} == {-1.0, 0.0}


@pytest.mark.parametrize("wrong", [tagged("9"), answer("4"), answer("<answer>4</answer>", "length")])
def test_an_illegal_move_loses(wrong: object) -> None:
    game = TicTacToe(plays="X")
    now(game.start(episode()))
    end = now(game.step(wrong))  # type: ignore[arg-type]
    assert isinstance(end, End)
    assert (end.reward, end.success) == (-1.0, False)
    assert end.metrics == {"won": 0.0, "drawn": 0.0, "lost": 1.0, "illegal": 1.0}


def test_the_seed_decides_who_begins() -> None:
    starts = {seed: now(TicTacToe().start(episode(seed))).state for seed in range(30)}
    assert EMPTY in starts.values()
    assert any(state is not None and state.count("O") == 0 and "X" in state for state in starts.values())
    assert now(TicTacToe(plays="O").start(episode(0))).state.count("X") == 1  # type: ignore[union-attr]


def test_self_play_alternates_the_roles_and_pays_the_winner() -> None:
    game = TicTacToeSelfPlay()
    seen = now(game.start(episode()))
    roles, firsts = [], []
    for cell in (0, 3, 1, 4):
        assert isinstance(seen, Observation)
        roles.append(seen.role)
        firsts.append("Tic-tac-toe: you play" in seen.messages[0]["content"])  # type: ignore[index]
        seen = now(game.step(tagged(str(cell))))
    assert (roles, firsts) == (["X", "O", "X", "O"], [True, True, False, False])
    end = now(game.step(tagged("2")))
    assert isinstance(end, End)
    assert (end.rewards, end.reward) == ({"X": 1.0, "O": -1.0}, None)


def test_an_illegal_move_in_self_play_pays_the_other_side() -> None:
    game = TicTacToeSelfPlay()
    now(game.start(episode()))
    now(game.step(tagged("4")))
    end = now(game.step(tagged("4")))
    assert isinstance(end, End)
    assert end.rewards == {"O": -1.0, "X": 1.0}


# --- Kuhn poker -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 7), Fraction(1, 3)])
def test_the_equilibria_have_the_known_value_and_no_exploitability(alpha: Fraction) -> None:
    policy = equilibrium(alpha)  # type: ignore[arg-type]
    assert len(policy) == 12
    assert expected_value(policy, policy) == Fraction(-1, 18)
    assert exploitability(policy) == 0
    assert best_response(policy, "second")[0] == Fraction(1, 18)


def test_other_policies_are_exploitable_by_known_amounts() -> None:
    keys = [key for role in INFORMATION_SETS for key in INFORMATION_SETS[role]]
    uniform = dict.fromkeys(keys, Fraction(1, 2))
    assert exploitability(uniform) == Fraction(11, 24)  # type: ignore[arg-type]
    assert exploitability(dict.fromkeys(keys, 1.0)) == pytest.approx(
        1 / 3
    )  # fold J for -1, be even with Q, win 2 with K
    too_bold = {**equilibrium(Fraction(1, 3)), "J": Fraction(1, 2)}  # type: ignore[arg-type]
    assert exploitability(too_bold) > 0


def test_a_best_response_against_a_player_who_always_folds_always_bets() -> None:
    timid = dict.fromkeys([key for keys in INFORMATION_SETS.values() for key in keys], 0.0)
    value, response = best_response(timid, "first")
    assert value == 1.0
    assert expected_value(response, timid) == 1.0


def test_every_line_of_the_game_pays_what_the_rules_say() -> None:
    lines = {
        ("check", "check"): 1,
        ("bet", "fold"): None,
        ("bet", "call"): 2,
        ("check", "bet", "fold"): None,
        ("check", "bet", "call"): 2,
    }
    seeds: dict[tuple[str, str], int] = {}
    for seed in itertools.count():
        game = KuhnPoker()
        now(game.start(episode(seed)))
        seeds.setdefault(game.deal, seed)
        if len(seeds) == 6:
            break
    for deal, (actions, stake) in itertools.product(DEALS, lines.items()):
        game = KuhnPoker()
        seen = now(game.start(episode(seeds[deal])))
        for turn, action in enumerate(actions):
            assert isinstance(seen, Observation)
            assert seen.role == ("first", "second")[turn % 2]
            assert f"You hold {deal[turn % 2]}." in seen.messages[0]["content"]  # type: ignore[index]
            seen = now(game.step(tagged(action)))
        higher = 1 if "JQK".index(deal[0]) > "JQK".index(deal[1]) else -1
        folds = {2: 1.0, 3: -1.0}[len(actions)]
        won = folds if stake is None else stake * higher
        assert isinstance(seen, End)
        assert seen.rewards == {"first": won, "second": -won}


def test_an_illegal_answer_loses_two() -> None:
    game = KuhnPoker(format="last_word")
    now(game.start(episode()))
    now(game.step(answer("I bet")))
    end = now(game.step(answer("check")))
    assert isinstance(end, End)
    assert (end.rewards, end.metrics) == ({"first": 2.0, "second": -2.0}, {"illegal": 1.0})


def test_sampled_answers_give_a_policy() -> None:
    game = KuhnPoker(format="brackets")
    exact = equilibrium()
    keys = [key for keys in INFORMATION_SETS.values() for key in keys]
    actions = {key: ("fold", "call") if key.endswith("b") else ("check", "bet") for key in keys}
    answers = {key: ["[raise]"] + [f"I [{actions[key][k < round(6 * exact[key])]}]" for k in range(6)] for key in keys}
    assert game.policy_of_answers(answers) == pytest.approx(exact)
    assert game.policy_of_answers({**answers, "K": ["hm"]})["K"] == 0.5


def test_the_messages_of_an_information_set_are_what_the_player_has_read() -> None:
    game = KuhnPoker()
    messages = game.information_set_messages()
    assert sorted(messages) == sorted(key for keys in INFORMATION_SETS.values() for key in keys)
    first = now(game.start(episode(5)))
    asked = now(game.step(tagged("check")))
    again = now(game.step(tagged("bet")))
    card, other = game.deal
    assert isinstance(asked, Observation)
    assert isinstance(again, Observation)
    assert messages[f"{other}c"] == list(asked.messages or ())
    assert messages[f"{card}cb"][0] == (first.messages or ())[0]
    assert messages[f"{card}cb"][2] == (again.messages or ())[0]
    assert (first.state, asked.state, again.state) == (card, f"{other}c", f"{card}cb")
