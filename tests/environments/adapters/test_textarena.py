"""Games with TextArena's interface: plain classes here, TextArena's own where it is installed."""

import asyncio
import random
import sys
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.adapters.textarena import TextArenaGame, TextArenaSelfPlay, random_move
from burnish.environments.base import End, Environment, Observation
from tests.environments.adapters.episodes import USER_FILES, answer, contents, episode, play


def race(**options: Any) -> TextArenaGame:
    return TextArenaGame(target="arena_game.py:Race", base=USER_FILES, **options)


def play_to_the_end(environment: Environment, seed: int, move: str, limit: int = 40) -> list[Observation | End]:
    async def run() -> list[Observation | End]:
        seen: list[Observation | End] = [await environment.start(episode(seed=seed))]
        while isinstance(seen[-1], Observation) and len(seen) < limit:
            seen.append(await environment.step(answer(move)))
        await environment.close()
        return seen

    return asyncio.run(run())


def test_model_reads_what_is_new_and_not_its_own_moves():
    seen = play(race(opponent="arena_game.py:always_step"), episode(seed=3), "I go. [step]")
    assert contents(seen[0]) == ["You are Player 0.\nAt [0, 0]. Available moves: '[step]', '[jump]'"]
    rng = random.Random(3)
    mine, theirs = rng.randint(1, 3), rng.randint(1, 3)
    moves = "Available moves: '[step]', '[jump]'"
    assert contents(seen[1]) == [f"At [{mine}, 0]. {moves}\n[Player 1] [step]\nAt [{mine}, {theirs}]. {moves}"]


def test_swapped_observations_are_understood():
    swapped = TextArenaGame(target="arena_game.py:Swapped", base=USER_FILES)
    assert play(swapped, episode(seed=3), "[step]") == play(race(), episode(seed=3), "[step]")


def test_outcome_is_the_reward_of_the_models_side():
    for seed in range(6):
        first, second = (play_to_the_end(race(player=side), seed, "[step]")[-1] for side in (0, 1))
        chosen = play_to_the_end(race(player="seed"), seed, "[step]")[-1]
        assert isinstance(first, End)
        assert isinstance(second, End)
        assert {first.reward, second.reward} <= {1.0, -1.0}
        assert chosen == (second if seed % 2 else first)
        assert first.metrics == {"invalid_move": 0.0, "game_turns": 3.0}


def test_games_in_one_process_do_not_disturb_each_other():
    alone = [play_to_the_end(race(), seed, "[jump]") for seed in (1, 2)]
    random.seed(4)
    before = random.getstate()

    async def interleaved() -> list[list[Observation | End]]:
        games = [race(), race()]
        seen: list[list[Observation | End]] = [[await g.start(episode(seed=k + 1))] for k, g in enumerate(games)]
        while any(isinstance(items[-1], Observation) for items in seen):
            for game, items in zip(games, seen, strict=True):
                if isinstance(items[-1], Observation):
                    items.append(await game.step(answer("[jump]")))
        return seen

    assert asyncio.run(interleaved()) == alone
    assert random.getstate() == before


def test_self_play_gives_each_role_its_own_observations_and_reward():
    environment = TextArenaSelfPlay(target="arena_game.py:Race", base=USER_FILES)
    seen = play_to_the_end(environment, 5, "[step]")
    assert [item.role for item in seen[:-1] if isinstance(item, Observation)] == [
        f"player_{index % 2}" for index in range(len(seen) - 1)
    ]
    assert contents(seen[1])[0].startswith("You are Player 1.")
    last = seen[-1]
    assert isinstance(last, End)
    winner = (len(seen) - 2) % 2
    assert last.rewards == {f"player_{winner}": 1.0, f"player_{1 - winner}": -1.0}
    assert last.reward is None


def test_random_opponent_needs_listed_moves():
    silent = TextArenaGame(target="arena_game.py:Silent", base=USER_FILES)
    with pytest.raises(UserError, match="opponent=random needs a game whose observation lists"):
        play(silent, episode(), "[step]")
    text = "Legal moves: [a], [b]\n[c]\nAvailable actions are: '[d]'\nnothing [e]"
    assert random_move(text, random.Random(0)) == "[d]"


def test_games_of_three_are_refused():
    with pytest.raises(UserError, match="is not for 1 or 2 players: The number of players has to be 3"):
        play(TextArenaGame(target="arena_game.py:Three", base=USER_FILES), episode())


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UserError, match=r"needs the package 'textarena'.*burnish\[textarena\]"):
        TextArenaGame("TicTacToe-v0")


# --- the package -------------------------------------------------------------------------------------------------------------


def test_guess_the_number_of_the_package():
    pytest.importorskip("textarena")
    seen = play(TextArenaGame("GuessTheNumber-v0"), episode(seed=11), "[10]", "[10]")
    again = play(TextArenaGame("GuessTheNumber-v0"), episode(seed=11), "[10]", "[10]")
    assert seen == again
    assert "between 1 and 20" in contents(seen[0])[0]
    assert "[10]" not in contents(seen[1])[0].replace("'[10]'", "")


def test_tic_tac_toe_of_the_package_against_a_random_opponent():
    pytest.importorskip("textarena")

    async def run(seed: int) -> End:
        environment = TextArenaGame("TicTacToe-v0", player="seed")
        seen: Observation | End = await environment.start(episode(seed=seed))
        while isinstance(seen, Observation):
            board = contents(seen)[-1].rpartition("Available Moves:")[2]
            seen = await environment.step(answer(board.partition(",")[0].strip().strip("'")))
        return seen

    ends = [asyncio.run(run(seed)) for seed in range(12)]
    assert all(end.metrics["invalid_move"] == 0 for end in ends)
    assert {end.reward for end in ends} > {1.0}
    assert ends == [asyncio.run(run(seed)) for seed in range(12)]


def test_invalid_moves_end_a_game_whose_reward_is_swapped():
    pytest.importorskip("textarena")
    end = play(TextArenaGame("Countdown-v0"), episode(seed=2), "[x]", "[x]")[-1]
    assert isinstance(end, End)
    assert end.reward is not None
    assert -1 <= end.reward <= 1
    assert end.text is not None
    assert end.text.startswith("Invalid Move: Invalid action format")


def test_wrappers_of_actions_still_apply():
    pytest.importorskip("textarena")
    plain, raw = (play(TextArenaGame(f"GuessTheNumber-v0{kind}"), episode(seed=11), "10") for kind in ("", "-raw"))
    assert "invalid" not in contents(plain[1])[0]  # the brackets were added
    assert "invalid move" in contents(raw[1])[0]


def test_kuhn_poker_of_the_package_in_self_play_and_rebuilt():
    pytest.importorskip("textarena")
    seen = play_to_the_end(TextArenaSelfPlay("KuhnPoker-v0"), 3, "[check]")
    end = seen[-1]
    assert isinstance(end, End)
    assert sum((end.rewards or {"": 1.0}).values()) == 0
    rebuilt = play(TextArenaGame("GuessTheNumber-v0", conversation="rebuild"), episode(seed=1), "[10]")
    assert isinstance(rebuilt[1], Observation)
    assert rebuilt[1].new_conversation
    assert "between 1 and 20" in contents(rebuilt[1])[0]  # the history so far
