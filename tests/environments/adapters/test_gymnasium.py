"""Environments with gymnasium's interface: plain classes here; gymnasium and GEM where they are installed."""

import asyncio
import random
import sys
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.adapters.gymnasium import GymEnvironment
from burnish.environments.base import End, Observation
from tests.environments.adapters.episodes import USER_FILES, answer, contents, episode, play, rewards


def gym(target: str, **options: Any) -> GymEnvironment:
    return GymEnvironment(target=target, base=USER_FILES, **options)


def test_lock_opens_with_the_digit_of_the_seed():
    environment = gym("lock_env.py:Lock")
    seen = play(environment, episode(seed=4), "I think 3", "7?", "So 5")
    assert contents(seen[0]) == ["Which digit opens the lock? Answer with one digit."]
    assert [contents(item) for item in seen[1:3]] == [["higher"], ["lower"]]
    assert seen[1].metrics == {"success": 0.0}
    assert seen[3] == End(reward=1.0, success=True, text="open", metrics={"success": 1.0})
    assert rewards(seen) == [0.0, 0.0, 1.0]


def test_row_prompt_and_states_are_reported_when_asked_for():
    seen = play(gym("lock_env.py:Lock", prompt="row_first", state=True), episode(prompt="Be quick."), "9")
    assert contents(seen[0]) == ["Be quick.\n\nWhich digit opens the lock? Answer with one digit."]
    assert [item.state for item in seen if isinstance(item, Observation)] == [
        "Which digit opens the lock? Answer with one digit.",
        "lower",
    ]


def test_discrete_actions_are_parsed_and_wrong_ones_are_not_played():
    environment = gym("gym_more.py:Doors", action="last_number", invalid_reward=-0.2)
    seen = play(environment, episode(seed=1), "Door 2 or 7", "no door", "1.5", "Doors 1, 3, 2.")
    assert contents(seen[0]) == ["Doors 1 to 3. Choose."]
    assert contents(seen[1]) == ["'7' is not an action: answer with a whole number from 1 to 3."]
    assert contents(seen[2]) == contents(seen[3]) == ["No action found: answer with a whole number."]
    right = random.Random(1).randint(1, 3)
    assert contents(seen[4]) == [f"It was {right}."]
    assert seen[4].metrics == {"right": right}
    assert rewards(seen) == [-0.2, -0.2, -0.2, float(right == 2) - 0.5]


def test_boxed_actions():
    seen = play(gym("gym_more.py:Doors", action="boxed"), episode(seed=1), "\\boxed{1} or \\boxed{ 3 }", "3")
    assert contents(seen[1]) == [f"It was {random.Random(1).randint(1, 3)}."]
    assert contents(seen[2]) == ["No action found: put it in \\boxed{}."]


def test_global_generator_belongs_to_each_environment():
    alone = [contents(item) for item in play(gym("gym_more.py:Doors", action="last_number"), episode(seed=5), *"1" * 8)]
    random.seed(99)
    before = random.getstate()

    async def interleaved() -> list[list[str]]:
        both = [gym("gym_more.py:Doors", action="last_number") for _ in range(2)]
        seen = [[contents(await e.start(episode(seed=s)))] for e, s in zip(both, (5, 6), strict=True)]
        for _ in range(8):
            for environment, list_ in zip(both, seen, strict=True):
                list_.append(contents(await environment.step(answer("1"))))
        return seen[0]

    assert asyncio.run(interleaved()) == alone
    assert random.getstate() == before


def test_what_is_not_text_is_refused():
    with pytest.raises(UserError, match="the observation is int, but the model reads text"):
        play(gym("gym_more.py:Numbers"), episode())
    seen = play(gym("gym_more.py:Numbers", row_options=True), episode(opening="Hello."))
    assert contents(seen[0]) == ["Hello."]
    with pytest.raises(UserError, match=r"set action=last_number or action=boxed"):
        play(gym("gym_more.py:Doors"), episode())
    with pytest.raises(UserError, match="old gym with four values"):
        play(gym("gym_more.py:OldGym"), episode(), "x")


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"needs the package 'gymnasium'.*pip install 'burnish\[gym\]'"):
        GymEnvironment("FrozenLake-v1")


def test_frozen_lake_of_gymnasium():
    pytest.importorskip("gymnasium")
    options = {"render_mode": "ansi", "is_slippery": False}
    environment = GymEnvironment("FrozenLake-v1", make_options=options, action="last_number", observation="render")
    seen = play(environment, episode(seed=0), "1", "1", "2", "2", "1", "9", "2")
    assert "FFFH" in contents(seen[0])[0]
    assert "from 0 to 3" in contents(seen[6])[0]
    assert rewards(seen) == [0.0] * 6 + [1.0]
    assert isinstance(seen[-1], End)


def test_continuous_actions_of_gymnasium_are_refused():
    pytest.importorskip("gymnasium")
    with pytest.raises(UserError, match="only texts and Discrete are possible"):
        play(GymEnvironment("Pendulum-v1"), episode())


def test_unknown_ids_are_refused():
    pytest.importorskip("gymnasium")
    with pytest.raises(UserError, match="gymnasium has no environment 'FrozenLakes-v1'"):
        GymEnvironment("FrozenLakes-v1")


def test_guess_the_number_of_gem():
    pytest.importorskip("gem")
    with pytest.raises(UserError, match="GEM has no environment 'game:GuessTheNumber-v0'"):
        GymEnvironment("game:GuessTheNumber-v0", library="gem")
    environment = GymEnvironment("game:GuessTheNumber-v0-easy", library="gem")
    guesses = [f"\\boxed{{{number}}}" for number in (5, 6, 7, 8)]
    seen, other = ([*play_until_end(environment, seed, guesses)] for seed in (3, 3))
    assert seen == other  # the same seed is the same game
    assert "between 1 and 10" in contents(seen[0])[0]


def play_until_end(environment: GymEnvironment, seed: int, guesses: list[str]) -> list[Observation | End]:
    async def run() -> list[Observation | End]:
        seen: list[Observation | End] = [await environment.start(episode(seed=seed))]
        for guess in guesses:
            if isinstance(seen[-1], Observation):
                seen.append(await environment.step(answer(guess)))
        await environment.close()
        return seen

    return asyncio.run(run())
