"""Rewards computed by Ray workers: `RewardWorker` scores answers, and `RemoteRewardPool` distributes them from the driver.

A thread of the driver sends calls to free workers, a few at a time, and reads their verdicts. A worker that dies or does not answer
is restarted, and its calls are sent again. A result depends only on its requests, and a verdict is accepted only from the worker
that has the call, so that no answer is lost or scored twice.
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

POLL_INTERVAL_S = 0.2
MAX_RESTARTS = 3
"""Restarts of a worker without an answer in between, after which its error is raised: it would die forever."""


# --- The worker's side -------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The outcome of a call: a result or a failure for each of its requests, or a timeout."""

    results: list[PartResult | ScoringFailure]
    timed_out: bool = False


class RewardWorker:
    """Scores calls: verifiers and users' functions in the processes of `setups`, reward models in this process."""

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
        self._reported: dict[str, int] = {}
        self._models = roles.build_reward_models(reward, tokenizer, base)

    @dispatch("each", "list")
    def score(self, calls: Sequence[ScoringCall]) -> tuple[list[Verdict], dict[str, int]]:
        """Score answers; also returns what happened to the scoring processes since the last call."""
        found: dict[int, Verdict] = {}
        left = {id(call): k for k, call in enumerate(calls) if call.part not in self._models}
        for k in left.values():
            self._pools[calls[k].part].submit([calls[k]])
        for k, call in enumerate(calls):
            if call.part in self._models:
                found[k] = self._score_by_model(call)
        while left:
            outcome = self._outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            k = left.pop(id(outcome.call))
            found[k] = _verdict(len(outcome.call.tickets), outcome.results, outcome.timed_out, outcome.error)
        return [found[k] for k in range(len(calls))], self._new_counts()

    def _score_by_model(self, call: ScoringCall) -> Verdict:
        requests = pickle.loads(call.payload)
        try:
            return _verdict(len(requests), self._models[call.part](requests))
        except Exception:  # noqa: BLE001 - as in a scoring process: a failure of each sample, and counted
            return _verdict(len(requests), error=traceback.format_exc())

    def _new_counts(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for pool in set(self._pools.values()):
            for name, count in pool.counters.items():
                total[name] = total.get(name, 0) + count
        before, self._reported = self._reported, total
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
    """A result that can be pickled."""
    return (
        result
        if isinstance(result, ScoringFailure)
        else result._replace(parts=dict(result.parts), extra=dict(result.extra))
    )


# --- The driver's side -------------------------------------------------------------------------------------------------


@dataclass
class _WorkerState:
    """The driver's state of one worker."""

    calls: list[ScoringCall] = field(default_factory=list)
    handle: CallHandle | None = None
    until: float = 0.0
    """Deadline of its answer."""
    restarts: int = 0


class RemoteRewardPool:
    """Distributes calls to a group of `RewardWorker`s; outcomes go to the given queue, in any order.

    Each worker has `processes` that verify, and a call takes at most `timeout_s`. A worker that is much later, or later than
    `deadline_s`, counts as dead. Calls of the parts `models`, which are reward models, only have `deadline_s`. An error of a worker is
    put into the queue instead of an outcome, and ends the thread.
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
        self._states = [_WorkerState() for _ in range(workers.size)]
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="burnish-rewards", daemon=True)
        self._thread.start()

    def submit(self, calls: Sequence[ScoringCall]) -> None:
        """Queue calls; returns at once."""
        for call in calls:
            self._inbox.put(call)

    def close(self) -> None:
        """Stop sending; calls without an outcome never get one. The workers are not ended here."""
        self._is_closing = True
        self._inbox.put(None)
        self._thread.join()

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._read_inbox()
                self._send_calls()
                self._read_results()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._outcomes.put(error)

    def _read_inbox(self) -> None:
        """Take new calls from the inbox; waits for one if no worker is busy."""
        waits = not self._waiting and all(state.handle is None for state in self._states)
        while waits or not self._inbox.empty():
            call = self._inbox.get()
            waits = False
            if call is not None:
                self._waiting.append(call)

    def _send_calls(self) -> None:
        """Give every free worker a share of the waiting calls: less as the queue empties, so that all end together."""
        for rank, state in enumerate(self._states):
            if state.handle is not None or not self._waiting:
                continue
            share = min(MAX_CALLS_PER_MESSAGE * self.processes, math.ceil(len(self._waiting) / (2 * len(self._states))))
            state.calls = [self._waiting.popleft() for _ in range(share)]
            longest_s = START_TIMEOUT_S + 2 * self.timeout_s * math.ceil(share / self.processes)
            # A reward model scores many samples in a call; the timeout of a verifier does not apply to it.
            has_model = any(call.part in self.models for call in state.calls)
            state.until = time.monotonic() + (self.deadline_s if has_model else min(self.deadline_s, longest_s))
            state.handle = self.workers.send(rank, "score", state.calls)

    def _read_results(self) -> None:
        """Read the verdicts that have arrived, waiting a moment for the first."""
        busy = [state.handle for state in self._states if state.handle is not None]
        ended = self.workers.ready(busy, POLL_INTERVAL_S if self._inbox.empty() else 0.0) if busy else []
        for handle in ended:
            state = self._states[handle.rank]
            try:
                verdicts, counted = self.workers.result(handle)
            except WorkerLost as error:
                self._replace(handle.rank, error)
                continue
            for call, verdict in zip(state.calls, verdicts, strict=True):
                self._put_outcomes(call, verdict)
            for name, amount in counted.items():
                self.counters[name] = self.counters.get(name, 0) + amount
            self._states[handle.rank] = _WorkerState()
        for rank, state in enumerate(self._states):
            if state.handle is not None and time.monotonic() > state.until:
                self._replace(rank, WorkerLost(f"reward rank {rank} does not answer", rank))

    def _replace(self, rank: int, error: WorkerLost) -> None:
        """Restart a worker, and queue its calls again."""
        state = self._states[rank]
        if state.restarts == MAX_RESTARTS:
            raise error
        self._waiting.extendleft(reversed(state.calls))
        self._states[rank] = _WorkerState(restarts=state.restarts + 1)
        self.counters["worker_restarts"] += 1
        answers = sum(len(call.tickets) for call in state.calls)
        self.note(f"reward worker {rank} is started again, and its {answers} answers are scored again: {error}")
        self.workers.restart(rank)

    def _put_outcomes(self, call: ScoringCall, verdict: Verdict) -> None:
        """Pass a verdict on; if some requests failed, as one outcome per request."""
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
