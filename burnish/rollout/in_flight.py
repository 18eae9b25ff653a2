"""Trajectories on their way through an engine. They can be stopped anywhere and go on under new weights.

A sample that is stopped keeps its tokens, each with the version of the weights that drew it; it goes on as a request whose prompt
has them already, and whose noise continues where it was. So does a sample whose environment wants another turn, with what the
environment says put between. One whose environment fails ends there, with the reason and without a reward.
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
from burnish.core.trajectory import TokenSequence, Trajectory, TrajectoryFinish, TurnSpan
from burnish.data.prompt_stream import PromptSample
from burnish.environments.base import Done, Environment, Turn
from burnish.rewards.score_types import reward_problem

if TYPE_CHECKING:
    from burnish.rollout.runner import RolloutRunner

REPLACEMENT_CHARACTER = "\ufffd"
"""What a tokenizer writes for a character of which only some bytes are there."""


@dataclass(eq=False, slots=True)
class RunningTrajectory:
    """One trajectory on its way."""

    draw: PromptSample
    sample: int
    key: int
    sampling: SamplingOptions
    priority: int = 0
    """A higher number is sampled first."""
    context: list[int] = field(default_factory=list)
    action: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    prompt_length: int = 0
    start: tuple[int, ...] = ()
    """The tokens of the prompt."""
    environment: Environment | None = None
    """None only where it could not be made."""
    state: str | None = None
    """What the environment said the present turn begins in."""
    turns: list[TurnSpan] = field(default_factory=list)
    """Those that are complete."""
    drawn: int = 0
    partial: int = 0
    """How many tokens of the present turn were drawn before it was stopped."""
    issues: int = 0
    """Requests made for it."""
    path: tuple[int, ...] = ()
    """Where it branched off others of its sample: which child it is, level by level."""
    ends: list[int] = field(default_factory=list)
    """Where it branched, in its tokens."""

    @property
    def label(self) -> str:
        """Which of its prompt's it is."""
        return ".".join(map(str, (self.sample, *self.path)))

    @property
    def oldest(self) -> int | None:
        """The version of its first token; None while it has none."""
        return next((version for version in self.version if version >= 0), None)

    def append(self, tokens: Sequence[int], logp: Sequence[float] | None = None, version: int = -1) -> None:
        """Add tokens that the model wrote, or, without log-probs, others."""
        written = logp is not None
        self.context.extend(tokens)
        self.action.extend([written] * len(tokens))
        self.logp.extend(logp if logp is not None else [0.0] * len(tokens))
        self.version.extend([version] * len(tokens))

    def forget(self, count: int) -> None:
        """Take back the last tokens of the present turn."""
        for column in (self.context, self.action, self.logp, self.version):
            del column[len(column) - count :]
        self.partial -= count
        self.drawn -= count


class InFlightTrajectories:
    """The trajectories of a driver that are in its engine, and those set aside until `go_on`."""

    def __init__(self, driver: RolloutRunner, is_continued: bool = False) -> None:
        """`is_continued` says that other answers will begin with parts of these."""
        self.driver, self.is_continued = driver, is_continued
        self.running: dict[str, RunningTrajectory] = {}
        """By the id of their request."""
        self.aside: list[RunningTrajectory] = []

    def __iter__(self) -> Iterator[RunningTrajectory]:
        yield from self.running.values()
        yield from self.aside

    def add(
        self, draw: PromptSample, sample: int, sampling: SamplingOptions, stream: str, priority: int = 0
    ) -> Trajectory | None:
        """A new trajectory, set aside; itself if its environment fails at once. Sample -1, a greedy answer, has the key of the first
        of its stream."""
        driver, row = self.driver, draw.prompt.row
        key = sample_key(driver.seed, stream, row.id, draw.visit, max(0, sample))
        one = RunningTrajectory(draw, sample, key, sampling, priority)

        def start() -> Turn | Done:
            one.environment = driver.make_environment(draw.prompt)
            return one.environment.start()

        answer = _call_environment(start, "start", row.id)
        if isinstance(answer, str):
            return self._trajectory(one, "error", error=answer)
        one.start = tuple(self._turn(one, answer, "start"))
        whole = len(one.start) + sampling.max_tokens
        if driver.longest is not None and whole > driver.longest:
            told = f"row {row.id}: the environment's start() gave {len(one.start)} tokens, and max_tokens={sampling.max_tokens} more make {whole}"
            if driver.longest == driver.max_tokens:  # what the environment says of one row is no reason to end the run
                told += f", but environment.max_tokens={driver.longest} is for all turns together; raise it, or lower max_tokens"
                return self._trajectory(one, "error", error=told)
            raise UserError(f"{told}, but the model is made for {driver.longest} positions; lower max_tokens")
        one.append(one.start)
        one.prompt_length = len(one.context)
        self.aside.append(one)
        return None

    def go_on(self) -> None:
        """Submit what is set aside."""
        waiting, self.aside = self.aside, []
        if waiting:
            self.driver.engine.submit([self._request(one) for one in waiting])

    def take(self, completion: Completion) -> Trajectory | None:
        """The trajectory if this completion ended it; else it is set aside for the rest of its turn, or its next one."""
        one = self.running.pop(completion.id)
        finished = self._observe(one, completion)
        if finished is None:
            self.aside.append(one)
        return finished

    def halt(self) -> list[Trajectory]:
        """Stop everything: it is set aside with the tokens it has. What ended meanwhile is returned. Nobody may be streaming."""
        engine, ended = self.driver.engine, list[Completion]()
        left = set(self.running)
        while left:
            stopped = engine.abort(left, keep=True)
            # What could not be stopped has ended and was not handed over yet, or is issued again: one of them, then look again.
            ended += stopped or list(islice(engine.stream(), 1))
            left -= {completion.id for completion in ended}
        for _ in engine.stream():  # empty: an interruption that nobody heard must not end the next one
            raise RuntimeError("an engine whose requests were all stopped has handed over another")
        return [finished for completion in ended if (finished := self.take(completion)) is not None]

    # --- one trajectory --------------------------------------------------------------------------------------------------

    def _request(self, one: RunningTrajectory) -> Request:
        again = f"~{one.issues}" if one.partial else ""
        name = f"{one.draw.prompt.row.id}#{one.draw.visit}.{one.label}/{len(one.turns)}{again}"
        self.running[name] = one
        one.issues += 1
        sampling = one.sampling
        if one.partial:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - one.partial)
        goes_on = self.is_continued or len(one.turns) + 1 < self.driver.max_turns
        tokens = one.start if len(one.context) == one.prompt_length else tuple(one.context)
        return Request(name, tokens, sampling, one.key, one.drawn, one.priority, goes_on)

    def _observe(self, one: RunningTrajectory, completion: Completion) -> Trajectory | None:
        """The trajectory if this completion ended it."""
        self._record(one, completion)
        if completion.finish == "aborted":
            self._cut(one)
            return None
        start = len(one.context) - one.partial
        tokens = one.context[start:]
        one.partial = 0
        one.turns.append(TurnSpan(start, one.state))
        if completion.finish == "length":
            return self._trajectory(one, "length")
        environment, text = one.environment, self.driver.tokenizer.decode(tokens)
        assert environment is not None, "it gave the prompt"
        answer = _call_environment(lambda: environment.observe(tokens, text), "observe", one.draw.prompt.row.id)
        if isinstance(answer, str):
            return self._trajectory(one, "error", error=answer)
        if isinstance(answer, Done):
            one.turns[-1] = TurnSpan(start, one.turns[-1].state, _checked_reward(answer.reward or 0.0))
            return self._trajectory(one, "stop", is_scored=answer.reward is not None)
        tokens = list(self._turn(one, answer, "observe"))
        one.turns[-1] = TurnSpan(start, one.turns[-1].state, _checked_reward(answer.reward))
        longest, most = self.driver.longest, one.sampling.max_tokens
        if longest is not None and len(one.context) + len(tokens) + most > longest:
            return self._trajectory(one, "length")  # there is no room for another turn
        if len(one.turns) >= self.driver.max_turns:
            return self._trajectory(one, "turns")
        one.append(tokens)
        return None

    def _record(self, one: RunningTrajectory, completion: Completion) -> None:
        """Put behind it what was drawn."""
        if not np.isfinite(completion.logp).all():
            raise UserError(
                f"{completion.id}: the model gives log-probs that are not finite, so its weights are broken; "
                "go back to an earlier checkpoint and lower training.optimizer.lr"
            )
        tokens = completion.tokens.tolist()
        one.append(tokens, completion.logp.tolist(), completion.version)
        one.drawn += len(tokens)
        one.partial += len(tokens)

    def _cut(self, one: RunningTrajectory) -> None:
        """Take back tokens that may be the beginning of a stop string: an engine looks for one in what it draws itself."""
        if not one.sampling.stop:
            return
        begun = tuple(text[:k] for text in one.sampling.stop for k in range(1, len(text) + 1))
        while one.partial:
            text = self.driver.tokenizer.decode(one.context[len(one.context) - one.partial :])
            if not text.endswith((REPLACEMENT_CHARACTER, *begun)):
                return
            one.forget(1)

    def _turn(self, one: RunningTrajectory, answer: object, method: str) -> tuple[int, ...]:
        """The tokens of an environment's answer: anything else than a turn of known tokens would pass for one, or end in a crash."""
        if not isinstance(answer, Turn):
            expected = "Turn" if method == "start" else "Turn or Done"
            raise UserError(f"the environment's {method}() returned {type(answer).__name__}; expected {expected}")
        size = self.driver.tokenizer.vocab_size
        if strange := [t for t in answer.tokens if not 0 <= t < size]:
            raise UserError(
                f"the environment's {method}() gave token {strange[0]}; the tokenizer knows 0 to {size - 1}"
            )
        if answer.state is not None and not isinstance(answer.state, str):
            raise UserError(
                f"the environment's {method}() gave a state of type {type(answer.state).__name__}; expected a text"
            )
        if one.turns and (answer.state is None) != (one.turns[0].state is None):
            raise UserError(
                "the environment reports its state in some turns and not in others; give Turn a state in all of them"
            )
        one.state = answer.state
        return answer.tokens

    def _trajectory(
        self, one: RunningTrajectory, finish: TrajectoryFinish, is_scored: bool = False, error: str | None = None
    ) -> Trajectory:
        """What came of it; `is_scored` where the environment said at the end what it earned."""
        earned = math.fsum(span.reward for span in one.turns)
        is_scored = error is None and (is_scored or getattr(one.environment, "gives_rewards", False))
        if earned and not is_scored and error is None:
            raise UserError(
                f"the environment gave turns of {one.draw.prompt.row.id} a reward and none at the end ({finish}): give Done a reward, and "
                "for trajectories that are cut off the class `gives_rewards = True`"
            )
        if wrong := reward_problem(earned):
            raise UserError(f"the environment's rewards of {one.draw.prompt.row.id}, added up over its turns: {wrong}")
        reward = earned if is_scored else None
        sequence = TokenSequence(
            tokens=np.array(one.context, dtype=np.int64),
            action_mask=np.array(one.action, dtype=bool),
            behaviour_logp=np.array(one.logp, dtype=np.float32),
            version=np.array(one.version, dtype=np.int32),
        )
        return Trajectory(
            prompt_id=one.draw.prompt.row.id,
            visit=one.draw.visit,
            sample=one.sample,
            sequences=[sequence],
            finish=finish,
            completion=self.driver.tokenizer.decode(one.context[one.prompt_length :]),
            reward=reward,
            accuracy=_accuracy(one.environment, reward),
            parts={} if reward is None else {"environment": reward},
            error=error,
            metadata={"prompt_length": one.prompt_length},
            turns=one.turns,
        )


def _accuracy(environment: object, reward: float | None) -> float | None:
    """Whether what an environment gave means success, which only the environment knows; None where it does not say."""
    threshold = getattr(environment, "correct_at", None)
    return None if reward is None or threshold is None else float(reward >= threshold)


def _call_environment(ask: Callable[[], Turn | Done], method: str, row: str) -> Turn | Done | str:
    """What an environment answers; where it raises, what it raised, in words. A mistake that its author names ends the run."""
    try:
        return ask()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (a user's code may raise anything: the sample is lost, and says why)
        return f"row {row}: the environment's {method}() raised {type(error).__name__}: {error}"


def _checked_reward(value: object) -> float:
    """A reward that an environment gave."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"the environment gave a turn the reward {value!r}; expected a finite number")
    if wrong := reward_problem(float(value)):
        raise UserError(f"the environment gave a turn a reward out of range: {wrong}")
    return float(value)
