"""Runs environments against any engine: trajectories out, as they finish.

Each sample of each prompt gets its own environment and its own random key; turns of many trajectories are in flight
at once. What comes out depends on the keys and the weights, not on the order of completion.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompts import Draw
from burnish.environments.base import MakeEnvironment
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.flight import Flight


class Driver:
    """Turns draws of prompts into trajectories."""

    def __init__(
        self,
        engine: Engine,
        make_environment: MakeEnvironment,
        tokenizer: Tokenizer,
        seed: int,
        max_turns: int = 1,
        max_positions: int | None = None,
    ) -> None:
        self.engine, self.make_environment, self.tokenizer = engine, make_environment, tokenizer
        self.seed, self.max_turns, self.max_positions = seed, max_turns, max_positions

    def run(
        self,
        draws: Sequence[Draw],
        n: int,
        sampling: SamplingOptions,
        stream: str,
        done: Container[tuple[str, int]] = frozenset(),
    ) -> Iterator[Trajectory]:
        """`n` trajectories of each draw, as they finish; those whose (prompt id, sample) is `done` are left out."""
        flight = Flight(self)
        for draw in draws:
            for sample in range(n):
                if (draw.prompt.row.id, sample) not in done:
                    flight.add(draw, sample, sampling, stream)
        flight.go_on()
        for completion in self.engine.stream():
            finished = flight.take(completion)
            if finished is not None:
                yield finished
            flight.go_on()
