"""The worker that scores: the processes of a reward's verifiers and its models, beside an actor of their own.

It is made from a run's reward and knows nothing of the controller, which calls the marked methods.
"""

from __future__ import annotations

import pickle
import queue
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from burnish.config.data import Reward
from burnish.core.dispatch import InProcess, Store, dispatch
from burnish.distributed import roles
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.types import Failure, Result
from burnish.rewards.worker import Call, Setup
from burnish.rewards.worker_pool import Outcomes, Pool


class Verdict(NamedTuple):
    """What became of a call: a result or a failure for each of its requests; or that it took too long."""

    results: list[Result | Failure]
    timed_out: bool = False


class RewardWorker:
    """Scores calls: those of verifiers and users' functions by the processes of `setups`, those of models here."""

    store: Store = InProcess()

    def __init__(
        self, reward: Reward, setups: Sequence[Setup], tokenizer: Tokenizer, base: Path | None, cpus: int
    ) -> None:
        torch.set_num_threads(cpus)
        self._outcomes: Outcomes = queue.SimpleQueue()
        self._pools: dict[int, Pool] = {}
        for setup in setups:
            pool = Pool(setup, reward.workers, self._outcomes)
            self._pools |= dict.fromkeys(setup.parts, pool)
        self._told: dict[str, int] = {}
        self._models = roles.build_models(reward, tokenizer, base)

    @dispatch("each", "list")
    def score(self, calls: Sequence[Call]) -> tuple[list[Verdict], dict[str, int]]:
        """Score answers; also what happened to the processes that did, since this was asked last."""
        found: dict[int, Verdict] = {}
        left = {id(call): k for k, call in enumerate(calls) if call.part not in self._models}
        for k in left.values():
            self._pools[calls[k].part].submit([calls[k]])
        for k, call in enumerate(calls):
            if call.part in self._models:
                found[k] = self._rated(call)
        while left:
            outcome = self._outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            k = left.pop(id(outcome.call))
            found[k] = _verdict(len(outcome.call.tickets), outcome.results, outcome.timed_out, outcome.error)
        return [found[k] for k in range(len(calls))], self._counted()

    def _rated(self, call: Call) -> Verdict:
        requests = pickle.loads(call.payload)
        try:
            return _verdict(len(requests), self._models[call.part](requests))
        except Exception:  # noqa: BLE001 - as of a scoring process: told with each sample, and counted
            return _verdict(len(requests), error=traceback.format_exc())

    def _counted(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for pool in set(self._pools.values()):
            for name, count in pool.counters.items():
                total[name] = total.get(name, 0) + count
        before, self._told = self._told, total
        return {name: count - before.get(name, 0) for name, count in total.items()}


def _verdict(
    count: int, results: Sequence[Result | Failure] | None = None, timed_out: bool = False, error: str | None = None
) -> Verdict:
    if results is None:
        return Verdict([Failure(error or "")] * count, timed_out)
    return Verdict([_plain(one) for one in results], timed_out)


def _plain(result: Result | Failure) -> Result | Failure:
    """A result that can travel."""
    return (
        result if isinstance(result, Failure) else result._replace(parts=dict(result.parts), extra=dict(result.extra))
    )
