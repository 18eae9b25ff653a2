"""`InFlightTrajectories` holds trajectories that have not ended: running in an engine, or paused between two requests.

A paused trajectory keeps its tokens, each with the version of the weights that sampled it. It continues as a request whose prompt
includes those tokens, and its random numbers continue at the same position. Multi-turn trajectories continue in the same way, with the
environment's tokens appended. A trajectory whose environment fails ends with an error text and without a reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import sample_key
from burnish.core.trajectory import Trajectory, TrajectoryFinish, TurnSpan, chain_nodes
from burnish.data.prompt_stream import PromptSample
from burnish.environments.base import Done, TokenEnvironment, Turn
from burnish.rewards.score_types import reward_problem

if TYPE_CHECKING:
    from burnish.rollout.runner import RolloutRunner

REPLACEMENT_CHARACTER = "\ufffd"
"""What a tokenizer decodes an incomplete UTF-8 sequence to."""


@dataclass(eq=False, slots=True)
class RunningTrajectory:
    """A trajectory that has not ended."""

    draw: PromptSample
    sample: int
    key: int
    """Random key of its sampling."""
    sampling: SamplingOptions
    priority: int = 0
    """Higher numbers are sampled first."""
    context: list[int] = field(default_factory=list)
    """All tokens so far, prompt included. The next three lists have one entry per token."""
    action_mask: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    prompt_length: int = 0
    start: tuple[int, ...] = ()
    """Tokens of the prompt."""
    environment: TokenEnvironment | None = None
    """None only if its constructor raised."""
    state: str | None = None
    """The environment state in which the current turn begins."""
    turns: list[TurnSpan] = field(default_factory=list)
    """Complete turns. Until the trajectory ends, `node` is the position of the turn's first token."""
    num_sampled: int = 0
    """Tokens that the model sampled, in all turns."""
    num_partial: int = 0
    """Tokens of the current turn that earlier requests sampled."""
    num_requests: int = 0
    path: tuple[int, ...] = ()
    """Only in a tree of answers: the child index at each level."""
    branch_points: list[int] = field(default_factory=list)
    """Positions in `context` at which its path branched."""

    @property
    def label(self) -> str:
        """Its name among the trajectories of the prompt."""
        return ".".join(map(str, (self.sample, *self.path)))

    @property
    def oldest(self) -> int | None:
        """The version of its first sampled token; None before that."""
        return next((version for version in self.version if version >= 0), None)

    def append(self, tokens: Sequence[int], logp: Sequence[float] | None = None, version: int = -1) -> None:
        """Add tokens: sampled ones with their log-probs, others without."""
        self.context.extend(tokens)
        self.action_mask.extend([logp is not None] * len(tokens))
        self.logp.extend(logp if logp is not None else [0.0] * len(tokens))
        self.version.extend([version] * len(tokens))

    def drop_last(self, count: int) -> None:
        """Remove the last sampled tokens of the current turn."""
        for column in (self.context, self.action_mask, self.logp, self.version):
            del column[len(column) - count :]
        self.num_partial -= count
        self.num_sampled -= count


class InFlightTrajectories:
    """The unfinished trajectories of a runner: running in its engine, or paused until `submit_pending`."""

    def __init__(self, runner: RolloutRunner, is_continued: bool = False) -> None:
        """`is_continued`: other answers will start from prefixes of these, so the engine should keep their KV cache."""
        self.runner, self.is_continued = runner, is_continued
        self.running: dict[str, RunningTrajectory] = {}
        """By request id."""
        self.paused: list[RunningTrajectory] = []

    def __iter__(self) -> Iterator[RunningTrajectory]:
        yield from self.running.values()
        yield from self.paused

    def add(
        self, draw: PromptSample, sample: int, sampling: SamplingOptions, stream: str, priority: int = 0
    ) -> Trajectory | None:
        """Add a new, paused trajectory and return None. If its environment fails to start, return the failed trajectory instead.

        The greedy answer (sample -1) has the random key of sample 0 of its stream.
        """
        runner, row = self.runner, draw.prompt.row
        key = sample_key(runner.seed, stream, row.id, draw.visit, max(0, sample))
        active = RunningTrajectory(draw, sample, key, sampling, priority)

        def start() -> Turn | Done:
            active.environment = runner.make_environment(draw.prompt)
            return active.environment.start()

        answer = _call_environment(start, "start", row.id)
        if isinstance(answer, str):
            return self._trajectory(active, "error", error=answer)
        active.start = tuple(self._checked_tokens(active, answer, "start"))
        num_tokens = len(active.start) + sampling.max_tokens
        if runner.longest is not None and num_tokens > runner.longest:
            problem = f"row {row.id}: the environment's start() gave {len(active.start)} tokens, and max_tokens={sampling.max_tokens} more make {num_tokens}"
            if runner.longest == runner.max_tokens:  # an environment's long prompt fails one sample, not the run
                problem += f", but environment.max_tokens={runner.longest} is for all turns together; raise it, or lower max_tokens"
                return self._trajectory(active, "error", error=problem)
            raise UserError(f"{problem}, but the model is made for {runner.longest} positions; lower max_tokens")
        active.append(active.start)
        active.prompt_length = len(active.context)
        self.paused.append(active)
        return None

    def submit_pending(self) -> None:
        """Submit all paused trajectories to the engine."""
        pending, self.paused = self.paused, []
        if pending:
            self.runner.engine.submit([self._request(active) for active in pending])

    def take(self, completion: Completion) -> Trajectory | None:
        """Process a completion. Returns the trajectory if it ended; otherwise it is paused until its next request."""
        active = self.running.pop(completion.id)
        finished = self._observe(active, completion)
        if finished is None:
            self.paused.append(active)
        return finished

    def pause_all(self) -> list[Trajectory]:
        """Abort all requests and pause their trajectories. Returns those that ended meanwhile. No stream may be open."""
        engine, ended = self.runner.engine, list[Completion]()
        left = set(self.running)
        while left:
            stopped = engine.abort(left, keep=True)
            # A request that could not be aborted has ended, or is being reissued: take one completion, then try again.
            ended += stopped or list(islice(engine.stream(), 1))
            left -= {completion.id for completion in ended}
        for _ in engine.stream():  # consumes a late interrupt, which would otherwise end the next stream
            raise RuntimeError("the engine returned a completion after all its requests were aborted")
        return [finished for completion in ended if (finished := self.take(completion)) is not None]

    def _request(self, active: RunningTrajectory) -> Request:
        """Build the next request of a trajectory and move the trajectory to `running`."""
        again = f"~{active.num_requests}" if active.num_partial else ""
        name = f"{active.draw.prompt.row.id}#{active.draw.visit}.{active.label}/{len(active.turns)}{again}"
        self.running[name] = active
        active.num_requests += 1
        sampling = active.sampling
        if active.num_partial:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - active.num_partial)
        may_continue = self.is_continued or len(active.turns) + 1 < self.runner.max_turns
        tokens = active.start if len(active.context) == active.prompt_length else tuple(active.context)
        return Request(name, tokens, sampling, active.key, active.num_sampled, active.priority, may_continue)

    def _observe(self, active: RunningTrajectory, completion: Completion) -> Trajectory | None:
        """Append a completion and call the environment. Returns the trajectory if it ended."""
        self._record(active, completion)
        if completion.finish == "aborted":
            self._drop_partial_stop(active)
            return None
        start = len(active.context) - active.num_partial
        tokens = active.context[start:]
        active.num_partial = 0
        active.turns.append(TurnSpan(start, active.state))
        if completion.finish == "length":
            return self._trajectory(active, "length")
        environment, text = active.environment, self.runner.tokenizer.decode(tokens)
        assert environment is not None, "a running trajectory has an environment"
        answer = _call_environment(lambda: environment.observe(tokens, text), "observe", active.draw.prompt.row.id)
        if isinstance(answer, str):
            return self._trajectory(active, "error", error=answer)
        if isinstance(answer, Done):
            active.turns[-1] = TurnSpan(start, active.turns[-1].state, _checked_reward(answer.reward or 0.0))
            return self._trajectory(active, "stop", is_scored=answer.reward is not None)
        tokens = list(self._checked_tokens(active, answer, "observe"))
        active.turns[-1] = TurnSpan(start, active.turns[-1].state, _checked_reward(answer.reward))
        longest, most = self.runner.longest, active.sampling.max_tokens
        if longest is not None and len(active.context) + len(tokens) + most > longest:
            return self._trajectory(active, "length")  # no room for another turn
        if len(active.turns) >= self.runner.max_turns:
            return self._trajectory(active, "turns")
        active.append(tokens)
        return None

    def _record(self, active: RunningTrajectory, completion: Completion) -> None:
        """Append the sampled tokens of a completion. Raises if a log-prob is not finite."""
        if not np.isfinite(completion.logp).all():
            raise UserError(
                f"{completion.id}: the model gives log-probs that are not finite, so its weights are broken; "
                "go back to an earlier checkpoint and lower training.optimizer.lr"
            )
        tokens = completion.tokens.tolist()
        active.append(tokens, completion.logp.tolist(), completion.version)
        active.num_sampled += len(tokens)
        active.num_partial += len(tokens)

    def _drop_partial_stop(self, active: RunningTrajectory) -> None:
        """Remove trailing tokens of an aborted request that may begin a stop string; they are sampled again.

        An engine finds stop strings only in the tokens of its current request.
        """
        if not active.sampling.stop:
            return
        prefixes = tuple(text[:k] for text in active.sampling.stop for k in range(1, len(text) + 1))
        while active.num_partial:
            text = self.runner.tokenizer.decode(active.context[len(active.context) - active.num_partial :])
            if not text.endswith((REPLACEMENT_CHARACTER, *prefixes)):
                return
            active.drop_last(1)

    def _checked_tokens(self, active: RunningTrajectory, answer: object, method: str) -> tuple[int, ...]:
        """Check an environment's turn, store its state and return its tokens. Wrong types or tokens would crash later or be trained on."""
        if not isinstance(answer, Turn):
            expected = "Turn" if method == "start" else "Turn or Done"
            raise UserError(f"the environment's {method}() returned {type(answer).__name__}; expected {expected}")
        size = self.runner.tokenizer.vocab_size
        if unknown := [t for t in answer.tokens if not 0 <= t < size]:
            raise UserError(
                f"the environment's {method}() gave token {unknown[0]}; the tokenizer knows 0 to {size - 1}"
            )
        if answer.state is not None and not isinstance(answer.state, str):
            raise UserError(
                f"the environment's {method}() gave a state of type {type(answer.state).__name__}; expected a text"
            )
        if active.turns and (answer.state is None) != (active.turns[0].state is None):
            raise UserError(
                "the environment reports its state in some turns and not in others; give Turn a state in all of them"
            )
        active.state = answer.state
        return answer.tokens

    def _trajectory(
        self, active: RunningTrajectory, finish: TrajectoryFinish, is_scored: bool = False, error: str | None = None
    ) -> Trajectory:
        """Return the finished trajectory. `is_scored`: the environment gave a reward at the end."""
        total_reward = math.fsum(span.reward for span in active.turns)
        is_scored = error is None and (is_scored or getattr(active.environment, "gives_rewards", False))
        if total_reward and not is_scored and error is None:
            raise UserError(
                f"the environment gave turns of {active.draw.prompt.row.id} a reward and none at the end ({finish}): give Done a reward, and "
                "for trajectories that are cut off the class `gives_rewards = True`"
            )
        if wrong := reward_problem(total_reward):
            raise UserError(
                f"the environment's rewards of {active.draw.prompt.row.id}, added up over its turns: {wrong}"
            )
        reward = total_reward if is_scored else None
        nodes = chain_nodes(
            tokens=np.array(active.context, dtype=np.int64),
            action_mask=np.array(active.action_mask, dtype=bool),
            behaviour_logp=np.array(active.logp, dtype=np.float32),
            version=np.array(active.version, dtype=np.int32),
            starts=[span.node for span in active.turns],
        )
        sampled = [index for index, node in enumerate(nodes) if node.is_sampled]
        return Trajectory(
            prompt_id=active.draw.prompt.row.id,
            visit=active.draw.visit,
            sample=active.sample,
            nodes=nodes,
            finish=finish,
            completion=self.runner.tokenizer.decode(active.context[active.prompt_length :]),
            reward=reward,
            accuracy=_accuracy(active.environment, reward),
            parts={} if reward is None else {"environment": reward},
            error=error,
            metadata={"prompt_length": active.prompt_length},
            turns=[span._replace(node=index) for index, span in zip(sampled, active.turns, strict=True)],
        )


def _accuracy(environment: object, reward: float | None) -> float | None:
    """Return 1 if a reward reaches the environment's `correct_at`, else 0; None if there is no reward or no `correct_at`."""
    threshold = getattr(environment, "correct_at", None)
    return None if reward is None or threshold is None else float(reward >= threshold)


def _call_environment(ask: Callable[[], Turn | Done], method: str, row: str) -> Turn | Done | str:
    """Call an environment and return its answer, or an error text if it raised. A `UserError` ends the run."""
    try:
        return ask()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (user code may raise anything; the sample fails with the reason)
        return f"row {row}: the environment's {method}() raised {type(error).__name__}: {error}"


def _checked_reward(value: object) -> float:
    """Return the reward as a float. Raises if it is no finite number within the allowed range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"the environment gave a turn the reward {value!r}; expected a finite number")
    if wrong := reward_problem(float(value)):
        raise UserError(f"the environment gave a turn a reward out of range: {wrong}")
    return float(value)
