"""Runs environments against any engine: trajectories out, as they finish.

Each sample of each prompt gets its own environment and its own random key; turns of many trajectories are in flight
at once. What comes out depends on the keys and the weights, not on the order of completion.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptSample
from burnish.environments.base import MakeEnvironment
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.segment_rollouts import AnswerPrefix, ChainPlan, ContinuedTrajectories, TreePlan, TreeTrajectories

Branching = ChainPlan | TreePlan
"""How the samples of a prompt come to have beginnings in common."""


MAX_EMPTY_STREAMS = 3
"""Streams in a row that may end without a completion: one is interrupted by a request to stop that came late."""


class RolloutStopped(Exception):
    """The user asked to stop while the samples of a step were made. The samples that had ended were yielded before."""


class StopRequest:
    """A request to end sampling early. Another thread may make it at any time; it acts only inside `allowed()`.

    So a measurement on held-out prompts, which uses the same engine, is never cut short.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self.is_requested = False
        self._interrupt, self._num_allowed, self._lock = interrupt, 0, threading.Lock()

    def request(self) -> None:
        """End the sampling that is allowed to end now, or else the next. Call it again while that has not happened."""
        with self._lock:
            self.is_requested = True
            if self._num_allowed:
                self._interrupt()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Sampling and scoring inside this block end with `RolloutStopped` once it is requested."""
        with self._lock:
            self._num_allowed += 1
            if self.is_requested:
                self._interrupt()
        try:
            yield
        finally:
            with self._lock:
                self._num_allowed -= 1

    @property
    def is_effective(self) -> bool:
        """Whether it is requested and allowed."""
        return self.is_requested and self._num_allowed > 0


def max_trajectory_tokens(max_positions: int | None, max_tokens: int | None) -> int | None:
    """The most tokens of a trajectory: what both the model and the environment allow. None: no limit."""
    return min((limit for limit in (max_positions, max_tokens) if limit is not None), default=None)


class RolloutRunner:
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
        self.longest = max_trajectory_tokens(max_positions, max_tokens)
        self.stopping = StopRequest(lambda: self.engine.interrupt())
        self.demonstrations: Callable[[PromptSample, int], list[Trajectory]] = no_demonstrations
        """What joins the samples of a draw in training, numbered from so many on."""

    def run(
        self,
        draws: Sequence[PromptSample],
        n: int,
        sampling: SamplingOptions,
        stream: str,
        done: Container[tuple[str, int]] = frozenset(),
        branching: Branching | None = None,
        kept: Container[tuple[str, int, int]] = frozenset(),
    ) -> Iterator[Trajectory]:
        """`n` trajectories of each draw, as they finish; those whose (prompt id, sample) is `done` are left out, and those whose
        (prompt id, visit, sample) is `kept`.

        As a tree they branch, and every path to a leaf is a trajectory; as a chain their beginnings will be continued. In training
        the demonstrations of a draw come with its samples.
        """
        flight = (
            TreeTrajectories(self, branching)
            if isinstance(branching, TreePlan)
            else InFlightTrajectories(self, branching is not None)
        )
        for draw in draws:
            for sample in range(n):
                row = draw.prompt.row
                if (row.id, sample) not in done and (row.id, draw.visit, sample) not in kept:
                    failed = flight.add(draw, sample, sampling, stream)
                    if failed is not None:
                        yield failed
        flight.go_on()
        for draw in draws if stream == "train" else ():
            yield from self.demonstrations(draw, n)
        yield from self._finish(flight)

    def continue_all(self, beginnings: Iterable[AnswerPrefix], sampling: SamplingOptions) -> Iterator[Trajectory]:
        """An answer continued from each of the beginnings, as they finish."""
        flight = ContinuedTrajectories(self)
        for beginning in beginnings:
            flight.add_beginning(beginning, sampling)
        flight.go_on()
        yield from self._finish(flight)

    def _finish(self, flight: InFlightTrajectories) -> Iterator[Trajectory]:
        """What comes of the trajectories on their way, as each ends."""
        num_empty = 0
        while True:
            num_empty += 1
            for completion in self.engine.stream():
                num_empty = 0
                finished = flight.take(completion)
                if finished is not None:
                    yield finished
                flight.go_on()
            if not flight.running:
                return
            # The stream was interrupted: to stop, or by a request to stop that came too late for the sampling before this one.
            if self.stopping.is_effective:
                yield from flight.halt()
                raise RolloutStopped
            if num_empty > MAX_EMPTY_STREAMS:
                raise RuntimeError(
                    f"the engine ended its stream {num_empty} times with {len(flight.running)} requests unanswered"
                )


def no_demonstrations(draw: PromptSample, first: int) -> list[Trajectory]:
    """The policy is on its own."""
    return []
