"""Runs environments against any engine: trajectories out, as they finish.

Each sample of each prompt gets its own environment and its own random key; turns of many trajectories are in flight
at once. What comes out depends on the keys and the weights, not on the order of completion.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompts import Draw
from burnish.environments.base import MakeEnvironment
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.chains import Beginning, Chain, ContinuedFlight
from burnish.rollout.flight import Flight
from burnish.rollout.trees import Tree, TreeFlight

Branching = Chain | Tree
"""How the samples of a prompt come to have beginnings in common."""


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
        max_tokens: int | None = None,
    ) -> None:
        """A trajectory has at most as many tokens as the model has positions, and as its environment may take (`max_tokens`)."""
        self.engine, self.make_environment, self.tokenizer = engine, make_environment, tokenizer
        self.seed, self.max_turns, self.max_positions, self.max_tokens = seed, max_turns, max_positions, max_tokens
        limits = [limit for limit in (max_positions, max_tokens) if limit is not None]
        self.longest = min(limits, default=None)
        self.demonstrations: Callable[[Draw, int], list[Trajectory]] = nobody
        """What joins the samples of a draw in training, numbered from so many on."""

    def run(
        self,
        draws: Sequence[Draw],
        n: int,
        sampling: SamplingOptions,
        stream: str,
        done: Container[tuple[str, int]] = frozenset(),
        branching: Branching | None = None,
    ) -> Iterator[Trajectory]:
        """`n` trajectories of each draw, as they finish; those whose (prompt id, sample) is `done` are left out.

        As a tree they branch, and every path to a leaf is a trajectory; as a chain their beginnings will be continued. In training
        the demonstrations of a draw come with its samples.
        """
        flight = TreeFlight(self, branching) if isinstance(branching, Tree) else Flight(self, branching is not None)
        for draw in draws:
            for sample in range(n):
                if (draw.prompt.row.id, sample) not in done:
                    failed = flight.add(draw, sample, sampling, stream)
                    if failed is not None:
                        yield failed
        flight.go_on()
        for draw in draws if stream == "train" else ():
            yield from self.demonstrations(draw, n)
        yield from self._finish(flight)

    def continue_all(self, beginnings: Iterable[Beginning], sampling: SamplingOptions) -> Iterator[Trajectory]:
        """An answer continued from each of the beginnings, as they finish."""
        flight = ContinuedFlight(self)
        for beginning in beginnings:
            flight.add_beginning(beginning, sampling)
        flight.go_on()
        yield from self._finish(flight)

    def _finish(self, flight: Flight) -> Iterator[Trajectory]:
        """What comes of the trajectories on their way, as each ends."""
        for completion in self.engine.stream():
            finished = flight.take(completion)
            if finished is not None:
                yield finished
            flight.go_on()


def nobody(draw: Draw, first: int) -> list[Trajectory]:
    """The policy is on its own."""
    return []
