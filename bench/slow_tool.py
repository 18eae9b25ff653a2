"""The environments of `tool_rollouts.py`, in a file of their own so that worker processes load nothing else."""

from __future__ import annotations

import asyncio
import time

from burnish.environments.base import Answer, End, Environment, Episode, Observation


class SlowTool(Environment):
    """Every answer but the last is followed by a tool that takes `tool_s` seconds and returns 16 characters."""

    takes_truncated = True

    def __init__(self, tool_s: float, turns: int) -> None:
        self.tool_s, self.turns = tool_s, turns

    async def start(self, episode: Episode) -> Observation:
        return Observation()

    async def step(self, answer: Answer) -> Observation | End:
        if answer.turn + 1 == self.turns:
            return End(reward=0.0)
        if self.tool_s:
            await asyncio.sleep(self.tool_s)
        return Observation(messages=({"role": "user", "content": "0123456789abcdef"},))


class BlockingTool(SlowTool):
    """The same with plain methods that block, as users write them."""

    def start(self, episode: Episode) -> Observation:  # type: ignore[override]
        return Observation()

    def step(self, answer: Answer) -> Observation | End:  # type: ignore[override]
        if answer.turn + 1 == self.turns:
            return End(reward=0.0)
        if self.tool_s:
            time.sleep(self.tool_s)
        return Observation(messages=({"role": "user", "content": "0123456789abcdef"},))
