"""Helpers of the adapters' tests: episodes, answers, and a loop that plays them."""

import asyncio
import json
from pathlib import Path
from typing import Any

from burnish.environments.base import Answer, End, Environment, Episode, Observation

USER_FILES = str(Path(__file__).parent / "user_files")


def episode(seed: int = 0, prompt: Any = "Go.", **columns: Any) -> Episode:
    return Episode("rows/0#0.0", seed, prompt, answer=columns.pop("answer", None), extra=columns)


def answer(text: str, turn: int = 0) -> Answer:
    return Answer(text, text, turn=turn)


def call(name: str, **arguments: Any) -> str:
    """A call in the format of Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(environment: Environment, row: Episode, *texts: str) -> list[Observation | End]:
    """Everything that the environment returns to these answers, from the start; closed afterwards."""

    async def run() -> list[Observation | End]:
        try:
            seen: list[Observation | End] = [await environment.start(row)]
            for turn, text in enumerate(texts):
                assert isinstance(seen[-1], Observation), f"the episode ended before answer {turn}"
                seen.append(await environment.step(answer(text, turn)))
            return seen
        finally:
            await environment.close()

    return asyncio.run(run())


def contents(observation: Observation | End) -> list[str]:
    assert isinstance(observation, Observation)
    assert observation.messages is not None
    return [message["content"] for message in observation.messages]


def rewards(seen: list[Observation | End]) -> list[float | None]:
    return [item.reward for item in seen[1:]]
