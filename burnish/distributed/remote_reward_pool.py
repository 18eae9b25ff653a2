"""The controller's side of rewards that are computed elsewhere: what `Rewards` holds in place of a pool of processes.

A thread deals calls to the workers that are free, a few at a time, and takes their verdicts. A worker that ends, or does not
answer, is named and started again, and the calls it had are dealt anew: what a call gives depends on its requests alone, and a
verdict is only ever taken of the worker that has the call, so no answer is scored twice and none is lost.
"""

from __future__ import annotations

import math
import pickle
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from burnish.config.data import Reward
from burnish.core.dispatch import CallHandle, InProcessStore, ObjectStore, WorkerLost, Workers, dispatch
from burnish.distributed import roles
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import PartResult, ScoringFailure
from burnish.rewards.worker import WorkerSetup
from burnish.rewards.worker_pool import (
    MAX_CALLS_PER_MESSAGE,
    START_TIMEOUT_S,
    CallOutcome,
    OutcomeQueue,
    ScoringCall,
    WorkerPool,
)

# --- The worker that scores: the processes of a reward's verifiers and its models, beside an actor of their own.
#
# It is made from a run's reward and knows nothing of the controller, which calls the marked methods.


class Verdict(NamedTuple):
    """What became of a call: a result or a failure for each of its requests; or that it took too long."""

    results: list[PartResult | ScoringFailure]
    timed_out: bool = False


class RewardWorker:
    """Scores calls: those of verifiers and users' functions by the processes of `setups`, those of models here."""

    store: ObjectStore = InProcessStore()

    def __init__(
        self, reward: Reward, setups: Sequence[WorkerSetup], tokenizer: Tokenizer, base: Path | None, cpus: int
    ) -> None:
        torch.set_num_threads(cpus)
        self._outcomes: OutcomeQueue = queue.SimpleQueue()
        self._pools: dict[int, WorkerPool] = {}
        for setup in setups:
            pool = WorkerPool(setup, reward.workers, self._outcomes)
            self._pools |= dict.fromkeys(setup.parts, pool)
        self._told: dict[str, int] = {}
        self._models = roles.build_reward_models(reward, tokenizer, base)

    @dispatch("each", "list")
    def score(self, calls: Sequence[ScoringCall]) -> tuple[list[Verdict], dict[str, int]]:
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

    def _rated(self, call: ScoringCall) -> Verdict:
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
    count: int,
    results: Sequence[PartResult | ScoringFailure] | None = None,
    timed_out: bool = False,
    error: str | None = None,
) -> Verdict:
    if results is None:
        return Verdict([ScoringFailure(error or "")] * count, timed_out)
    return Verdict([_picklable(one) for one in results], timed_out)


def _picklable(result: PartResult | ScoringFailure) -> PartResult | ScoringFailure:
    """A result that can travel."""
    return (
        result
        if isinstance(result, ScoringFailure)
        else result._replace(parts=dict(result.parts), extra=dict(result.extra))
    )


POLL_INTERVAL_S = 0.2
MAX_RESTARTS = 3
"""Times that a worker is started again without having answered in between: it would end for ever."""


@dataclass
class _WorkerState:
    """What is known of one worker."""

    calls: list[ScoringCall] = field(default_factory=list)
    handle: CallHandle | None = None
    until: float = 0.0
    """When it must have answered."""
    restarts: int = 0


class RemoteRewardPool:
    """Deals calls to a group of `RewardWorker`s; outcomes go to the queue it is given, in any order.

    Each worker has `processes` that verify, and a call takes at most `timeout_s`; one that has not answered for much longer, or
    for `deadline_s`, is stopped or cut off; of calls of the parts `models`, which are reward models, only the latter is asked. An error of a worker's is put in the queue instead of an outcome, and ends this.
    """

    def __init__(
        self,
        workers: Workers,
        outcomes: OutcomeQueue,
        processes: int,
        timeout_s: float,
        deadline_s: float,
        note: Callable[[str], None],
        models: Collection[int] = (),
    ) -> None:
        self.models = models
        self.workers, self.processes, self.timeout_s, self.deadline_s = workers, processes, timeout_s, deadline_s
        self.note = note
        self.counters = {"scorer_retried": 0, "worker_restarts": 0}
        self._outcomes = outcomes
        self._inbox: queue.SimpleQueue[ScoringCall | None] = queue.SimpleQueue()
        self._waiting: deque[ScoringCall] = deque()
        self._desks = [_WorkerState() for _ in range(workers.size)]
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="burnish-rewards", daemon=True)
        self._thread.start()

    def submit(self, calls: Sequence[ScoringCall]) -> None:
        """Queue calls; returns at once."""
        for call in calls:
            self._inbox.put(call)

    def close(self) -> None:
        """Stop dealing; calls without an outcome never get one. Whoever started the workers ends them."""
        self._is_closing = True
        self._inbox.put(None)
        self._thread.join()

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._take_in()
                self._deal()
                self._listen()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._outcomes.put(error)

    def _take_in(self) -> None:
        """The calls that came; waits for one where nobody has anything to do."""
        waits = not self._waiting and all(desk.handle is None for desk in self._desks)
        while waits or not self._inbox.empty():
            call = self._inbox.get()
            waits = False
            if call is not None:
                self._waiting.append(call)

    def _deal(self) -> None:
        """Give every free worker its share of what is waiting: less as the queue empties, so that all end together."""
        for rank, desk in enumerate(self._desks):
            if desk.handle is not None or not self._waiting:
                continue
            share = min(MAX_CALLS_PER_MESSAGE * self.processes, math.ceil(len(self._waiting) / (2 * len(self._desks))))
            desk.calls = [self._waiting.popleft() for _ in range(share)]
            longest_s = START_TIMEOUT_S + 2 * self.timeout_s * math.ceil(share / self.processes)
            # A model scores many samples in a call, at a pace that no timeout of a verifier says anything about.
            has_model = any(call.part in self.models for call in desk.calls)
            desk.until = time.monotonic() + (self.deadline_s if has_model else min(self.deadline_s, longest_s))
            desk.handle = self.workers.send(rank, "score", desk.calls)

    def _listen(self) -> None:
        """Take the verdicts that are there, waiting a moment for the first."""
        busy = [desk.handle for desk in self._desks if desk.handle is not None]
        ended = self.workers.ready(busy, POLL_INTERVAL_S if self._inbox.empty() else 0.0) if busy else []
        for handle in ended:
            desk = self._desks[handle.rank]
            try:
                verdicts, counted = self.workers.result(handle)
            except WorkerLost as error:
                self._replace(handle.rank, error)
                continue
            for call, verdict in zip(desk.calls, verdicts, strict=True):
                self._tell(call, verdict)
            for name, amount in counted.items():
                self.counters[name] = self.counters.get(name, 0) + amount
            self._desks[handle.rank] = _WorkerState()
        for rank, desk in enumerate(self._desks):
            if desk.handle is not None and time.monotonic() > desk.until:
                self._replace(rank, WorkerLost(f"reward rank {rank} does not answer", rank))

    def _replace(self, rank: int, error: WorkerLost) -> None:
        """Start a worker again; what it had is dealt anew."""
        desk = self._desks[rank]
        if desk.restarts == MAX_RESTARTS:
            raise error
        self._waiting.extendleft(reversed(desk.calls))
        self._desks[rank] = _WorkerState(restarts=desk.restarts + 1)
        self.counters["worker_restarts"] += 1
        answers = sum(len(call.tickets) for call in desk.calls)
        self.note(f"reward worker {rank} is started again, and its {answers} answers are scored again: {error}")
        self.workers.restart(rank)

    def _tell(self, call: ScoringCall, verdict: Verdict) -> None:
        """Pass a verdict on: of each request alone where some could not be scored."""
        if verdict.timed_out:
            self._outcomes.put(CallOutcome(call, timed_out=True))
            return
        scored = [result for result in verdict.results if isinstance(result, PartResult)]
        if len(scored) == len(verdict.results):
            self._outcomes.put(CallOutcome(call, scored))
            return
        for ticket, result in zip(call.tickets, verdict.results, strict=True):
            alone = ScoringCall(call.part, (ticket,), b"")
            if isinstance(result, ScoringFailure):
                self._outcomes.put(CallOutcome(alone, error=result.error))
            else:
                self._outcomes.put(CallOutcome(alone, [result]))
