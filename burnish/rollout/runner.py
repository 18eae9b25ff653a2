"""`RolloutRunner` runs environments against any engine and yields trajectories as they finish.

Each sample of each prompt has its own environment and random key. All trajectories are in flight at once. Their tokens depend on keys and
weights, not on the order of completion. A trajectory that waits for its environment has no request in the engine, which decodes the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptSample
from burnish.environments.base import MakeEnvironment
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.segment_rollouts import AnswerPrefix, ChainPlan, ContinuedTrajectories, TreePlan, TreeTrajectories

if TYPE_CHECKING:
    from burnish.environments.dialogue import ChatRenderer
    from burnish.environments.host import EnvironmentHost
    from burnish.gateway.endpoint import RecordingEndpoint
    from burnish.gateway.session_export import TrainedCalls
    from burnish.rollout.opponents import OpponentPool

Branching = ChainPlan | TreePlan
"""How the samples of a prompt share prefixes: segments of a chain, or a tree."""
REPLY_WAIT_S = 0.2
"""How long the runner waits for an environment before it looks for a request to stop."""
MAX_EMPTY_STREAMS = 3
"""How many streams in a row may end without a completion. A stop request that came late may interrupt a stream; more is a bug."""


class RolloutStopped(Exception):
    """Raised when the user asks to stop during sampling or scoring. Finished samples were yielded before."""


class StopRequest:
    """A request to end sampling early. Any thread may make it at any time; it takes effect only inside `allowed()`.

    Validation uses the same engine outside of `allowed()`, so it is never cut short.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self.is_requested = False
        self._interrupt, self._num_allowed, self._lock = interrupt, 0, threading.Lock()

    def request(self) -> None:
        """End the current or the next sampling inside `allowed()`. May be called repeatedly."""
        with self._lock:
            self.is_requested = True
            if self._num_allowed:
                self._interrupt()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Sampling and scoring inside this block end with `RolloutStopped` after a request."""
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
        """Whether a stop is requested and allowed."""
        return self.is_requested and self._num_allowed > 0


def max_trajectory_tokens(max_positions: int | None, max_tokens: int | None) -> int | None:
    """Return the most tokens of a trajectory that both the model and the environment allow; None without a limit."""
    return min((limit for limit in (max_positions, max_tokens) if limit is not None), default=None)


class RolloutRunner:
    """Samples trajectories for drawn prompts. It keeps no trajectories between two calls of `run`."""

    def __init__(
        self,
        engine: Engine,
        make_environment: MakeEnvironment | None,
        tokenizer: Tokenizer,
        seed: int,
        max_turns: int = 1,
        max_positions: int | None = None,
        max_tokens: int | None = None,
        host: EnvironmentHost | None = None,
        renderer: ChatRenderer | None = None,
        retries: int = 0,
        endpoint: RecordingEndpoint | None = None,
        trained_calls: TrainedCalls = "all",
        credit: Literal["episode", "branch"] = "episode",
    ) -> None:
        """`max_positions` is the model's limit on the tokens of a trajectory, `max_tokens` the environment's.

        `host` runs environments on messages, whose messages `renderer` turns into tokens; without it, `make_environment` gives environments
        on tokens. An episode whose environment fails is started again up to `retries` times. Agents that call the model themselves have an
        `endpoint`, `trained_calls` says which of their calls are trained, and `credit` what is compared: episodes or their branches.
        """
        self.engine, self.make_environment, self.tokenizer = engine, make_environment, tokenizer
        self.host, self.renderer, self.retries = host, renderer, retries
        self.endpoint, self.trained_calls, self.credit = endpoint, trained_calls, credit
        self.roles: tuple[str, ...] = host.kind.roles if host is not None else ()
        """Players of a game of several: each sample gives one trajectory for each role."""
        self.opponents: OpponentPool | None = None
        """Earlier weights of the policy that play in games of training."""
        self.seed, self.max_turns, self.max_positions, self.max_tokens = seed, max_turns, max_positions, max_tokens
        self.longest = max_trajectory_tokens(max_positions, max_tokens)
        self.stop_request = StopRequest(lambda: self.engine.interrupt())
        self.demonstrations: Callable[[PromptSample, int], list[Trajectory]] = no_demonstrations
        """Takes a draw and a first sample index; returns the demonstrations that join its samples in training, numbered from there."""

    def run(
        self,
        draws: Sequence[PromptSample],
        n: int,
        sampling: SamplingOptions,
        stream: str,
        done: Container[tuple[str, int]] = frozenset(),
        branching: Branching | None = None,
        resumed: Container[tuple[str, int, int]] = frozenset(),
    ) -> Iterator[Trajectory]:
        """Yield `n` trajectories per draw as they finish, and in training the demonstrations of each draw.

        Samples are left out if (prompt id, sample) is in `done` or (prompt id, visit, sample) is in `resumed`. With a tree plan, every
        path to a leaf is a trajectory. With a chain plan, the engine keeps KV caches, because `continue_all` will continue the answers.
        """
        in_flight = (
            TreeTrajectories(self, branching)
            if isinstance(branching, TreePlan)
            else self.in_flight(branching is not None)
        )
        try:
            for draw in draws:
                for sample in range(n):
                    if not self.is_sampled(draw, sample, done, resumed):
                        yield from in_flight.add(draw, sample, sampling, stream)
            in_flight.submit_pending()
            for draw in draws if stream == "train" else ():
                yield from self.demonstrations(draw, n)
            yield from self._finish(in_flight)
        finally:
            in_flight.close()

    def in_flight(self, is_continued: bool = False) -> InFlightTrajectories:
        """Return an empty collection of trajectories of the configured environment."""
        if self.endpoint is None:
            return InFlightTrajectories(self, is_continued)
        from burnish.rollout.agent_episodes import AgentTrajectories  # needs the extra [agents]

        return AgentTrajectories(self, is_continued)

    def continue_all(self, prefixes: Iterable[AnswerPrefix], sampling: SamplingOptions) -> Iterator[Trajectory]:
        """Yield one continued answer per prefix, as they finish."""
        in_flight = ContinuedTrajectories(self)
        for prefix in prefixes:
            in_flight.add_prefix(prefix, sampling)
        in_flight.submit_pending()
        yield from self._finish(in_flight)  # these answers have no environments to close

    def _finish(self, in_flight: InFlightTrajectories) -> Iterator[Trajectory]:
        """Yield the trajectories in flight as they end."""
        num_empty = 0
        while in_flight.running or in_flight.waiting:
            num_empty += 1
            for completion in self.engine.stream():
                num_empty = 0
                yield from in_flight.take(completion)
                yield from in_flight.take_replies()
                in_flight.submit_pending()
            # The stream is empty or was interrupted: by a reply of an environment, by a request to stop now, or by one that came
            # too late for the previous sampling.
            if self.stop_request.is_effective:
                yield from in_flight.pause_all()
                raise RolloutStopped
            if in_flight.waiting:
                num_empty = 0
                yield from in_flight.take_replies(0.0 if in_flight.running else REPLY_WAIT_S)
                in_flight.submit_pending()
            if num_empty > MAX_EMPTY_STREAMS:
                raise RuntimeError(
                    f"the engine ended its stream {num_empty} times with {len(in_flight.running)} requests unanswered"
                )

    def is_sampled(
        self,
        draw: PromptSample,
        sample: int,
        done: Container[tuple[str, int]] = frozenset(),
        resumed: Container[tuple[str, int, int]] = frozenset(),
    ) -> bool:
        """Whether a trajectory of a sample is in `done` or `resumed`, as `run` takes them. A role without a turn has none."""
        row, num = draw.prompt.row.id, len(self.roles) or 1
        names = range(sample * num, (sample + 1) * num)
        return any((row, k) in done or (row, draw.visit, k) in resumed for k in names)

    def episode_index(self, sample: int) -> int:
        """Return the index of the episode that a trajectory comes from. In a game of several players, several come from one."""
        return sample // len(self.roles) if self.roles and sample >= 0 else sample

    def close(self) -> None:
        """Close the endpoint and the environments' processes."""
        if self.host is not None and self.endpoint is not None:
            self.host.run(self.endpoint.close())
        if self.host is not None:
            self.host.close()


def no_demonstrations(draw: PromptSample, first: int) -> list[Trajectory]:
    """Return no demonstrations. The default of `RolloutRunner.demonstrations`."""
    return []
