"""The controller's side of rewards that are computed elsewhere: what `Rewards` holds in place of a pool of processes.

A thread deals calls to the workers that are free, a few at a time, and takes their verdicts. A worker that ends, or does not
answer, is named and started again, and the calls it had are dealt anew: what a call gives depends on its requests alone, and a
verdict is only ever taken of the worker that has the call, so no answer is scored twice and none is lost.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from burnish.core.dispatch import Handle, WorkerLost, Workers
from burnish.distributed.reward_worker import Verdict
from burnish.rewards.types import Failure, Result
from burnish.rewards.worker import START_S, Call
from burnish.rewards.worker_pool import BATCH, Outcome, Outcomes

LOOK_EVERY_S = 0.2
MAX_RESTARTS = 3
"""Times that a worker is started again without having answered in between: it would end for ever."""


@dataclass
class _Desk:
    """What is known of one worker."""

    calls: list[Call] = field(default_factory=list)
    handle: Handle | None = None
    until: float = 0.0
    """When it must have answered."""
    restarts: int = 0


class RewardDesk:
    """Deals calls to a group of `RewardWorker`s; outcomes go to the queue it is given, in any order.

    Each worker has `processes` that verify, and a call takes at most `timeout_s`; one that has not answered for much longer, or
    for `deadline_s`, is stopped or cut off; of calls of the parts `models`, which are reward models, only the latter is asked. An error of a worker's is put in the queue instead of an outcome, and ends this.
    """

    def __init__(
        self,
        workers: Workers,
        outcomes: Outcomes,
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
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._waiting: deque[Call] = deque()
        self._desks = [_Desk() for _ in range(workers.size)]
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="burnish-rewards", daemon=True)
        self._thread.start()

    def submit(self, calls: Sequence[Call]) -> None:
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
            share = min(BATCH * self.processes, math.ceil(len(self._waiting) / (2 * len(self._desks))))
            desk.calls = [self._waiting.popleft() for _ in range(share)]
            longest_s = START_S + 2 * self.timeout_s * math.ceil(share / self.processes)
            # A model scores many samples in a call, at a pace that no timeout of a verifier says anything about.
            has_model = any(call.part in self.models for call in desk.calls)
            desk.until = time.monotonic() + (self.deadline_s if has_model else min(self.deadline_s, longest_s))
            desk.handle = self.workers.send(rank, "score", desk.calls)

    def _listen(self) -> None:
        """Take the verdicts that are there, waiting a moment for the first."""
        busy = [desk.handle for desk in self._desks if desk.handle is not None]
        ended = self.workers.ready(busy, LOOK_EVERY_S if self._inbox.empty() else 0.0) if busy else []
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
            self._desks[handle.rank] = _Desk()
        for rank, desk in enumerate(self._desks):
            if desk.handle is not None and time.monotonic() > desk.until:
                self._replace(rank, WorkerLost(f"reward rank {rank} does not answer", rank))

    def _replace(self, rank: int, error: WorkerLost) -> None:
        """Start a worker again; what it had is dealt anew."""
        desk = self._desks[rank]
        if desk.restarts == MAX_RESTARTS:
            raise error
        self._waiting.extendleft(reversed(desk.calls))
        self._desks[rank] = _Desk(restarts=desk.restarts + 1)
        self.counters["worker_restarts"] += 1
        answers = sum(len(call.tickets) for call in desk.calls)
        self.note(f"reward worker {rank} is started again, and its {answers} answers are scored again: {error}")
        self.workers.restart(rank)

    def _tell(self, call: Call, verdict: Verdict) -> None:
        """Pass a verdict on: of each request alone where some could not be scored."""
        if verdict.timed_out:
            self._outcomes.put(Outcome(call, timed_out=True))
            return
        scored = [result for result in verdict.results if isinstance(result, Result)]
        if len(scored) == len(verdict.results):
            self._outcomes.put(Outcome(call, scored))
            return
        for ticket, result in zip(call.tickets, verdict.results, strict=True):
            alone = Call(call.part, (ticket,), b"")
            if isinstance(result, Failure):
                self._outcomes.put(Outcome(alone, error=result.error))
            else:
                self._outcomes.put(Outcome(alone, [result]))
