"""Trajectories on their way through an engine. They can be stopped anywhere and go on under new weights.

A sample that is stopped keeps its tokens, each with the version of the weights that drew it; it goes on as a request whose prompt
has them already, and whose noise continues where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.keys import sample_key
from burnish.core.trajectory import Finish, TokenSequence, Trajectory
from burnish.data.prompts import Draw
from burnish.environments.base import Done, Environment, Turn

if TYPE_CHECKING:
    from burnish.rollout.driver import Driver

BROKEN = "\ufffd"
"""What a tokenizer writes for a character of which only some bytes are there."""


@dataclass(eq=False, slots=True)
class Running:
    """One trajectory on its way."""

    draw: Draw
    sample: int
    key: int
    environment: Environment
    sampling: SamplingOptions
    priority: int = 0
    """A higher number is sampled first."""
    context: list[int] = field(default_factory=list)
    action: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    prompt_length: int = 0
    drawn: int = 0
    turns: int = 0
    partial: int = 0
    """How many tokens of the present turn were drawn before it was stopped."""
    issues: int = 0
    """Requests made for it."""

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


class Flight:
    """The trajectories of a driver that are in its engine, and those set aside until `go_on`."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.running: dict[str, Running] = {}
        """By the id of their request."""
        self.aside: list[Running] = []

    def __iter__(self) -> Iterator[Running]:
        yield from self.running.values()
        yield from self.aside

    def add(self, draw: Draw, sample: int, sampling: SamplingOptions, stream: str, priority: int = 0) -> Running:
        """A new trajectory, set aside. Sample -1, a greedy answer, has the key of the first of its stream."""
        driver, row = self.driver, draw.prompt.row
        key = sample_key(driver.seed, stream, row.id, draw.visit, max(0, sample))
        one = Running(draw, sample, key, driver.make_environment(draw.prompt), sampling, priority)
        one.append(self._turn(one.environment.start(), "start"))
        one.prompt_length = len(one.context)
        self.aside.append(one)
        return one

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

    def _request(self, one: Running) -> Request:
        again = f"~{one.issues}" if one.partial else ""
        name = f"{one.draw.prompt.row.id}#{one.draw.visit}.{one.sample}/{one.turns}{again}"
        self.running[name] = one
        one.issues += 1
        sampling = one.sampling
        if one.partial:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - one.partial)
        return Request(name, tuple(one.context), sampling, one.key, one.drawn, one.priority)

    def _observe(self, one: Running, completion: Completion) -> Trajectory | None:
        """The trajectory if this completion ended it."""
        if not np.isfinite(completion.logp).all():
            raise UserError(
                f"{completion.id}: the model gives log-probs that are not finite, so its weights are broken; "
                "go back to an earlier checkpoint and lower training.optimizer.lr"
            )
        tokens = completion.tokens.tolist()
        one.append(tokens, completion.logp.tolist(), completion.version)
        one.drawn += len(tokens)
        one.partial += len(tokens)
        if completion.finish == "aborted":
            self._cut(one)
            return None
        tokens = one.context[len(one.context) - one.partial :]
        one.partial = 0
        one.turns += 1
        if completion.finish == "length":
            return self._trajectory(one, "length", None)
        answer = one.environment.observe(tokens, self.driver.tokenizer.decode(tokens))
        if isinstance(answer, Done):
            return self._trajectory(one, "stop", answer.reward)
        tokens = list(self._turn(answer, "observe"))
        longest, most = self.driver.max_positions, one.sampling.max_tokens
        if longest is not None and len(one.context) + len(tokens) + most > longest:
            return self._trajectory(one, "length", None)  # the model has no room for another turn
        if one.turns >= self.driver.max_turns:
            return self._trajectory(one, "turns", None)
        one.append(tokens)
        return None

    def _cut(self, one: Running) -> None:
        """Take back tokens that may be the beginning of a stop string: an engine looks for one in what it draws itself."""
        if not one.sampling.stop:
            return
        begun = tuple(text[:k] for text in one.sampling.stop for k in range(1, len(text) + 1))
        while one.partial:
            text = self.driver.tokenizer.decode(one.context[len(one.context) - one.partial :])
            if not text.endswith((BROKEN, *begun)):
                return
            one.forget(1)

    def _turn(self, answer: object, method: str) -> tuple[int, ...]:
        """The tokens of an environment's answer: anything else than a turn of known tokens would pass for one, or end in a crash."""
        if not isinstance(answer, Turn):
            expected = "Turn" if method == "start" else "Turn or Done"
            raise UserError(f"the environment's {method}() returned {type(answer).__name__}; expected {expected}")
        size = self.driver.tokenizer.vocab_size
        if strange := [t for t in answer.tokens if not 0 <= t < size]:
            raise UserError(
                f"the environment's {method}() gave token {strange[0]}; the tokenizer knows 0 to {size - 1}"
            )
        return answer.tokens

    def _trajectory(self, one: Running, finish: Finish, reward: float | None) -> Trajectory:
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
            accuracy=None if reward is None else float(reward >= 1),
            parts={} if reward is None else {"environment": reward},
            metadata={"prompt_length": one.prompt_length},
        )
