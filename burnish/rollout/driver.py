"""Runs environments against any engine: trajectories out, as they finish.

Each sample of each prompt gets its own environment and its own random key; turns of many trajectories are in flight
at once. What comes out depends on the keys and the weights, not on the order of completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Engine, Request, SamplingOptions
from burnish.core.keys import sample_key
from burnish.core.trajectory import Finish, TokenSequence, Trajectory
from burnish.data.prompts import Draw
from burnish.environments.base import Done, Environment, MakeEnvironment, Turn
from burnish.models.tokenizer import Tokenizer


@dataclass
class _Running:
    """A trajectory on its way."""

    draw: Draw
    sample: int
    key: int
    environment: Environment
    context: list[int] = field(default_factory=list)
    action: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    prompt_length: int = 0
    drawn: int = 0
    turns: int = 0

    def append(self, tokens: Sequence[int], logp: Sequence[float] | None = None, version: int = -1) -> None:
        written = logp is not None
        self.context.extend(tokens)
        self.action.extend([written] * len(tokens))
        self.logp.extend(logp if logp is not None else [0.0] * len(tokens))
        self.version.extend([version] * len(tokens))


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

    def run(self, draws: Sequence[Draw], n: int, sampling: SamplingOptions, stream: str) -> Iterator[Trajectory]:
        """`n` trajectories of each draw, as they finish."""
        running: dict[str, _Running] = {}
        requests = []
        for draw in draws:
            for sample in range(n):
                key = sample_key(self.seed, stream, draw.prompt.row.id, draw.visit, sample)
                one = _Running(draw, sample, key, self.make_environment(draw.prompt))
                one.append(self._turn(one.environment.start(), "start"))
                one.prompt_length = len(one.context)
                requests.append(self._request(one, sampling, running))
        self.engine.submit(requests)
        for completion in self.engine.stream():
            one = running.pop(completion.id)
            finished = self._observe(one, completion, sampling.max_tokens)
            if finished is None:
                self.engine.submit([self._request(one, sampling, running)])
            else:
                yield finished

    def _request(self, one: _Running, sampling: SamplingOptions, running: dict[str, _Running]) -> Request:
        name = f"{one.draw.prompt.row.id}#{one.draw.visit}.{one.sample}/{one.turns}"
        running[name] = one
        return Request(name, tuple(one.context), sampling, one.key, one.drawn)

    def _observe(self, one: _Running, completion: Completion, max_tokens: int) -> Trajectory | None:
        """The trajectory if this completion ended it, else None with the next turn in the context."""
        if not np.isfinite(completion.logp).all():
            raise UserError(
                f"{completion.id}: the model gives log-probs that are not finite, so its weights are broken; "
                "go back to an earlier checkpoint and lower training.optimizer.lr"
            )
        tokens = completion.tokens.tolist()
        one.append(tokens, completion.logp.tolist(), completion.version)
        one.drawn += len(tokens)
        one.turns += 1
        if completion.finish == "length":
            return self._trajectory(one, "length", None)
        answer = one.environment.observe(tokens, self.tokenizer.decode(tokens))
        if isinstance(answer, Done):
            return self._trajectory(one, "stop", answer.reward)
        tokens = self._turn(answer, "observe")
        if self.max_positions is not None and len(one.context) + len(tokens) + max_tokens > self.max_positions:
            return self._trajectory(one, "length", None)  # the model has no room for another turn
        if one.turns >= self.max_turns:
            return self._trajectory(one, "turns", None)
        one.append(tokens)
        return None

    def _turn(self, answer: object, method: str) -> tuple[int, ...]:
        """The tokens of an environment's answer: anything else than a turn of known tokens would pass for one, or end in a crash."""
        if not isinstance(answer, Turn):
            expected = "Turn" if method == "start" else "Turn or Done"
            raise UserError(f"the environment's {method}() returned {type(answer).__name__}; expected {expected}")
        size = self.tokenizer.vocab_size
        if strange := [t for t in answer.tokens if not 0 <= t < size]:
            raise UserError(
                f"the environment's {method}() gave token {strange[0]}; the tokenizer knows 0 to {size - 1}"
            )
        return answer.tokens

    def _trajectory(self, one: _Running, finish: Finish, reward: float | None) -> Trajectory:
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
            completion=self.tokenizer.decode(one.context[one.prompt_length :]),
            reward=reward,
            accuracy=None if reward is None else float(reward >= 1),
            parts={} if reward is None else {"environment": reward},
            metadata={"prompt_length": one.prompt_length},
        )
