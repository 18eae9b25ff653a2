"""Plays games for tests and writes down all that happened."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from burnish.data.tasks.games import GAME_TASKS
from burnish.data.tasks.registry import make_task
from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games import GAMES
from burnish.environments.games.text_game import Game

T = TypeVar("T")


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as the runner needs it from a game."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("a game waited")


def episode(seed: int = 10_000, split: str = "train", **more: Any) -> Episode:
    return Episode(f"row/{seed}", seed, "", extra={"split": split}, **more)


def row_episode(name: str, split: str, index: int, run_seed: int = 0) -> Episode:
    """The episode of a row of the game's data task."""
    row = make_task(name, {}, run_seed).row(split, index)
    seed = row.extra["seed"] if name in GAME_TASKS else 0
    return Episode(row.id, seed, row.prompt, row.answer, row.extra)


def answer(text: str, finish: Any = "stop") -> Answer:
    return Answer(text, text, finish)


def tagged(action: str) -> Answer:
    return answer(f"<think>so</think><answer>{action}</answer>")


async def _play(game: Game, of: Episode, player: Callable[[Game], str]) -> list[Observation | End]:
    seen: list[Observation | End] = [await game.start(of)]
    while not isinstance(seen[-1], End):
        seen.append(await game.step(answer(player(game))))
    return seen


def transcript(name: str, of: Episode, player: str = "random", **options: Any) -> list[Observation | End]:
    """All observations of an episode and its end. The player's randomness follows from the episode."""
    dice = Dice("player", of.seed, of.id)
    best = player == "best"
    return now(_play(GAMES[name](**options), of, lambda game: game.best_answer() if best else game.random_answer(dice)))


def total_reward(seen: list[Observation | End]) -> float:
    return sum(part.reward or 0.0 for part in seen)
