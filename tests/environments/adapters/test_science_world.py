"""ScienceWorld: the adapter's arithmetic with a small simulator, and the package itself where it is installed."""

import asyncio
import sys
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.adapters import science_world
from burnish.environments.adapters.science_world import ScienceWorld
from burnish.environments.base import End
from tests.environments.adapters.episodes import answer, contents, episode, play, rewards


class Kitchen:
    """The methods of `ScienceWorldEnv` that the adapter calls. Each `heat` is worth 40 points."""

    def __init__(self) -> None:
        self.tasks = {"1-1": "boil", "1-2": "melt"}

    def load(self, task: str, variation: int, simplification: str) -> None:
        self.loaded = (task, variation, simplification)

    def reset(self) -> tuple[str, dict[str, Any]]:
        self.score = 0
        return "a kitchen\n", {}

    def get_task_description(self) -> str:
        return f"Task {self.loaded}."

    def get_variations_train(self) -> list[int]:
        return [0, 1, 2]

    def get_variations_test(self) -> list[int]:
        return [5, 6]

    def get_max_variations(self, task: str) -> int:
        return 7

    def look(self) -> str:
        return "a kitchen"

    def step(self, action: str) -> tuple[str, int, bool, dict[str, Any]]:
        before, self.score = self.score, min(100, self.score + 40 * (action == "heat"))
        if action == "jump":
            self.score = -100
        is_done = self.score in (100, -100)
        return f"you {action}", self.score - before, is_done, {"score": self.score, "look": "a kitchen"}


@pytest.fixture
def kitchens(monkeypatch: pytest.MonkeyPatch) -> list[Kitchen]:
    made: list[Kitchen] = []

    def simulator(step_limit: int) -> Kitchen:
        made.append(Kitchen())
        return made[-1]

    monkeypatch.setattr(science_world, "_simulator", simulator)
    return made


def test_reward_is_the_change_of_the_score(kitchens):
    seen = play(ScienceWorld("boil", simplification="easy"), episode(seed=4), "heat", " look ", "heat", "heat")
    assert contents(seen[0]) == [
        "Task ('boil', 1, 'easy').\n\na kitchen\n\nWrite one action as your whole answer.",
    ]
    assert contents(seen[2]) == ["you look"]
    assert rewards(seen) == [0.4, 0.0, 0.4, pytest.approx(0.2)]
    assert seen[4] == End(reward=0.2, success=True, text="you heat", metrics={"score": 100})


def test_fatal_mistake_loses_all(kitchens):
    seen = play(ScienceWorld("boil"), episode(), "heat", "jump")
    assert rewards(seen) == [0.4, -1.4]
    assert seen[2].success is False


def test_one_simulator_serves_many_episodes(kitchens):
    environment = ScienceWorld(["boil", "melt"], variations="test")
    assert environment.is_reusable
    play(environment, episode(seed=0), "heat")
    play(environment, episode(seed=3), "heat")
    assert kitchens[0].loaded == ("melt", 6, "")
    play(environment, episode(seed=3, task="1-1", variation=4))
    assert kitchens[0].loaded == ("1-1", 4, "")
    assert len(kitchens) == 1


def test_action_stands_in_its_tag(kitchens):
    seen = play(ScienceWorld("boil", action_tag="act"), episode(), "heat", "Now <act>heat</act>")
    assert contents(seen[1]) == ["Write one action between <act> and </act>."]
    assert contents(seen[2]) == ["you heat"]
    assert rewards(seen) == [0.0, 0.4]


def test_unknown_tasks_and_variations_are_refused(kitchens):
    with pytest.raises(UserError, match="ScienceWorld has no task 'boill'; did you mean 'boil'"):
        play(ScienceWorld("boill"), episode())
    with pytest.raises(UserError, match=r"has variations 0 to 6, got \[9\]"):
        play(ScienceWorld("boil", variations=[9]), episode())


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scienceworld", None)
    with pytest.raises(UserError, match=r"needs the package 'scienceworld'.*burnish\[scienceworld\]"):
        play(ScienceWorld("boil"), episode())


def test_package_plays_the_gold_path():
    pytest.importorskip("scienceworld")

    async def run() -> tuple[list[Any], list[Any]]:
        environment = ScienceWorld("find-living-thing", simplification="easy")
        first = await environment.start(episode(seed=2))
        environment.env.load("find-living-thing", environment.env.variationIdx, "easy", generateGoldPath=True)
        environment.env.reset()
        gold = environment.env.get_gold_action_sequence()
        again = await environment.start(episode(seed=2))
        seen: list[Any] = [again]
        for action in gold:
            if not isinstance(seen[-1], End):
                seen.append(await environment.step(answer(action)))
        return [first, again], seen

    starts, seen = asyncio.run(run())
    assert starts[0] == starts[1]
    assert seen[-1].success
    assert sum(item.reward for item in seen[1:]) == pytest.approx(1.0)
