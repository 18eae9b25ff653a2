"""A pool of worker processes with a hard deadline on every call.

A thread owns the workers, so deadlines hold and work goes on while the caller is busy with something else. The rules:

- a call past its deadline: its worker is killed and replaced, the call is `timed_out`, never retried;
- a call that raises, or whose worker dies or is stopped (SIGSTOP) under it: retried once, on another worker, then reported with
  the traceback;
- the other calls of a killed worker go back to the queue, without blame.

Calls go out in batches and come back one by one, so the first unanswered call of a worker is the one it is at.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import pickle
import queue
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.rewards.score_types import PartResult
from burnish.rewards.worker import START_TIMEOUT_S, ScoringCall, WorkerProcess, WorkerSetup, describe_exit, start_worker
from burnish.run.supervisor.processes import is_stopped

logger = logging.getLogger(__name__)

MAX_CALLS_PER_MESSAGE = (
    32  # calls in a message: enough to make a message cheap, few enough to share the last ones out evenly
)
MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class CallOutcome:
    """What became of a call: results (one a request), or a timeout, or the error of its second failure."""

    call: ScoringCall
    results: list[PartResult] | None = None
    timed_out: bool = False
    error: str | None = None


OutcomeQueue = queue.SimpleQueue[CallOutcome | BaseException]


def _parse_result(
    value: float | None,
    accuracy: float | None,
    parts: dict[str, float],
    details: str,
    timed_out: bool,
    extra: dict[str, Any],
) -> PartResult:
    """A result as a worker sent it; ValueError or TypeError if it is none."""
    as_floats = {key: float(number) for key, number in parts.items()}
    return PartResult(
        None if value is None else float(value),
        None if accuracy is None else float(accuracy),
        as_floats,
        str(details),
        bool(timed_out),
        extra={str(column): _checked_log_value(shown) for column, shown in extra.items()},
    )


def _checked_log_value(shown: Any) -> Any:
    """What a function logged beside a sample; ValueError for anything that is not a number, a truth value, null or a text."""
    if shown is not None and not isinstance(shown, bool | int | float | str):
        raise ValueError(f"a {type(shown).__name__} beside a sample")
    return shown


class WorkerPool:
    """Worker processes that have loaded the same parts; outcomes go to the queue it is given, in any order.

    A worker that cannot start is fatal: the error is put in that queue instead of an outcome, and the pool ends.
    """

    def __init__(self, setup: WorkerSetup, num_workers: int, outcomes: OutcomeQueue) -> None:
        self.counters = {"scorer_retried": 0, "worker_restarts": 0}
        self._setup = setup
        self._num_workers = num_workers
        self._outcomes = outcomes
        self._directory = os.getcwd()
        self._numbers = itertools.count()
        self._serials = itertools.count()
        self._inbox: queue.SimpleQueue[ScoringCall] = queue.SimpleQueue()
        self._waiting: deque[ScoringCall] = deque()
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._is_closing = False
        self._has_warned = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_rope = socket.socketpair()  # wakes the thread from its wait
        self._bell.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="burnish-rewards", daemon=True)
        self._thread.start()

    def submit(self, calls: Sequence[ScoringCall]) -> None:
        """Queue calls; returns at once."""
        for call in calls:
            self._inbox.put(call)
        self._ring()

    def close(self) -> None:
        """Kill and reap every worker; calls without an outcome never get one."""
        self._is_closing = True
        self._ring()
        self._thread.join()
        self._bell.close()
        self._bell_rope.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # rung more often than heard, so it will be heard
            self._bell_rope.send(b"!", socket.MSG_DONTWAIT)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for _ in range(self._num_workers):
                self._start()
            while not self._is_closing:
                self._dispatch()
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._bell:
                        self._bell.recv(4096)
                    elif key.data in self._workers:
                        self._read(key.data)
                while not self._inbox.empty():
                    self._waiting.append(self._inbox.get_nowait())
                self._enforce_deadlines()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._outcomes.put(error)
        finally:
            for worker in self._workers:
                worker.kill()
            self._selector.close()

    def _start(self) -> None:
        worker = start_worker(next(self._numbers), self._setup, self._directory)
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _patience_s(self) -> float | None:
        deadlines = [w.deadline for w in self._workers if w.is_waited_for]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _dispatch(self) -> None:
        """Give every idle worker its share of what is waiting: less as the queue empties, so that all end together."""
        for worker in list(self._workers):
            if worker.is_waited_for or not self._waiting:
                continue
            share = min(MAX_CALLS_PER_MESSAGE, math.ceil(len(self._waiting) / (2 * self._num_workers)))
            worker.calls.extend((next(self._serials), call) for call in self._take(share, worker))
            worker.deadline = time.monotonic() + self._setup.timeout_s
            try:
                worker.send(pickle.dumps([(serial, call.part, call.payload) for serial, call in worker.calls]))
            except OSError:  # it died while idle: nothing it was given has run
                self._replace(worker, blame=False)

    def _take(self, share: int, worker: WorkerProcess) -> list[ScoringCall]:
        """The next calls for a worker, leaving those that failed on it to the others if there are others."""
        taken: list[ScoringCall] = []
        passed_over: list[ScoringCall] = []
        while self._waiting and len(taken) < share:
            call = self._waiting.popleft()
            avoids = call.avoid == worker.number and self._num_workers > 1
            (passed_over if avoids else taken).append(call)
        self._waiting.extendleft(reversed(passed_over))
        return taken

    def _read(self, worker: WorkerProcess) -> None:
        try:
            bodies, is_open = worker.receive()
            for body in bodies:
                self._hear(worker, json.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            # Only code that an answer smuggled in can make a worker speak out of turn.
            self._replace(worker, reason=f"the scoring process sent an unreadable reply ({error})")
        else:
            if not is_open:
                self._replace(worker)

    def _hear(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if "failed" in message:
            raise UserError(message["failed"])
        if not worker.is_ready:
            worker.is_ready = bool(message["ready"])
            self._failed_starts = 0
            if self._setup.isolated and not message["offline"] and not self._has_warned:
                self._has_warned = True
                logger.warning("this system does not let verifier processes give up the network; they keep it")
            return
        serial, call = worker.calls[0]
        if message["serial"] != serial:
            raise ValueError(f"answers call {message['serial']} while at {serial}")
        late = message["elapsed_s"] > self._setup.timeout_s
        results = [_parse_result(*r) for r in message["results"]] if "results" in message else None
        if results is not None and len(results) != len(call.tickets):
            raise ValueError(f"{len(results)} results for {len(call.tickets)} requests")
        worker.calls.popleft()
        worker.deadline = time.monotonic() + self._setup.timeout_s
        if late:  # finished just before the kill: the same verdict as just after it
            self._outcomes.put(CallOutcome(call, timed_out=True))
        elif results is None:
            self._fail(call, worker, message["error"])
        else:
            self._outcomes.put(CallOutcome(call, results))

    def _enforce_deadlines(self) -> None:
        for worker in list(self._workers):
            if worker.is_waited_for and time.monotonic() > worker.deadline:
                self._read(worker)  # its answer may have arrived while this thread was kept waiting
                if worker not in self._workers or time.monotonic() <= worker.deadline or not worker.is_waited_for:
                    continue
                if is_stopped(worker.process.pid):  # which says nothing of the answer it was at
                    for _, call in list(worker.calls)[:1]:
                        worker.calls.popleft()
                        self._fail(call, worker, "the scoring process was stopped by a signal during this call")
                elif not worker.is_ready:
                    raise UserError(
                        f"a scoring process was not ready {START_TIMEOUT_S:.0f} s after its start: {self._names()}"
                    )
                else:
                    self._outcomes.put(CallOutcome(worker.calls.popleft()[1], timed_out=True))
                self._replace(worker, blame=False)

    # --- when things go wrong ----------------------------------------------------------------------------------------

    def _replace(self, worker: WorkerProcess, blame: bool = True, reason: str | None = None) -> None:
        """Bury a worker, requeue what it had, start another; blame the call it was at if it died by itself."""
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        status = worker.kill()
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                raise UserError(
                    f"{MAX_FAILED_STARTS} scoring processes in a row ended before they were ready; the last one "
                    f"{describe_exit(status)} while loading {self._names()}. If it ran out of memory, raise "
                    f"reward.memory_gib (now {self._setup.memory_gib:g})"
                )
        if blame and worker.calls:
            call = worker.calls.popleft()[1]
            if status == -signal.SIGXCPU:
                self._outcomes.put(CallOutcome(call, timed_out=True))
            else:
                self._fail(call, worker, reason or f"the scoring process {describe_exit(status)} during this call")
        self._waiting.extendleft(call for _, call in reversed(worker.calls))
        self.counters["worker_restarts"] += 1
        self._start()

    def _fail(self, call: ScoringCall, worker: WorkerProcess, error: str) -> None:
        call.failures += 1
        if call.failures > 1:
            self._outcomes.put(CallOutcome(call, error=error))
            return
        self.counters["scorer_retried"] += 1
        call.avoid = worker.number
        self._waiting.appendleft(call)

    def _names(self) -> str:
        return ", ".join(part.name for part in self._setup.parts.values())
