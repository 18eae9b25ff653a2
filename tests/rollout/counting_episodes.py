"""Episodes that count the tokens of answers, and runners that play them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from burnish.config.data import Template
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.environments.base import Environment
from burnish.environments.dialogue import ChatRenderer
from burnish.environments.host import (
    EnvironmentHost,
    EnvironmentKind,
)
from burnish.environments.workers import ObjectSpec, ObjectWorkers
from burnish.rollout.runner import RolloutRunner
from tests.rollout.test_in_flight import TOKENIZER, draws

SAMPLING = SamplingOptions(max_tokens=6, stop_tokens=(1,))
COUNTING = """
from burnish.environments.base import Answer, End, Environment, Episode, Observation


class Counting(Environment):
    takes_truncated = True

    def __init__(self, turns=3):
        self.turns = turns

    async def start(self, episode):
        self.seed, self.told = episode.seed, 0
        return Observation(state="0")

    async def step(self, answer):
        self.told += answer.num_tokens
        if answer.turn + 1 == self.turns:
            return End(reward=float(self.told), success=self.told > 3)
        text = str(self.told % 10) + ">"
        return Observation(messages=({"role": "user", "content": text},), reward=0.5, state=str(answer.turn))
"""
namespace: dict[str, Any] = {}
exec(COUNTING, namespace)
Counting: Any = namespace["Counting"]


def runner_of(
    engine: Any,
    make: Callable[[], Environment] | None,
    runs_in: Any = "loop",
    spec: ObjectSpec | None = None,
    **options: Any,
) -> RolloutRunner:
    limits = {name: options.pop(name) for name in ("retries", "max_tokens") if name in options}
    max_turns = options.pop("max_turns", 5)
    kind = EnvironmentKind("test", runs_in, make=make, spec=spec, **({"takes_truncated": True} | options))
    host = EnvironmentHost(kind, lambda: ObjectWorkers(num_workers=1))
    renderer = ChatRenderer(TOKENIZER, Template(kind="plain"))
    return RolloutRunner(engine, None, TOKENIZER, 7, max_turns, host=host, renderer=renderer, **limits)  # type: ignore[arg-type]


def played(runner: RolloutRunner, n: int = 2) -> dict[str, Trajectory]:
    try:
        return {t.id: t for t in runner.run(draws(), n, SAMPLING, "train")}
    finally:
        runner.close()


def facts(found: dict[str, Trajectory]) -> dict[str, Any]:
    return {
        name: (
            t.sequences[0].tokens.tolist(),
            t.sequences[0].action_mask.tolist(),
            t.turns,
            t.reward,
            t.accuracy,
            t.finish,
        )
        for name, t in found.items()
    }
