"""A pool of worker processes with a hard deadline on every call.

A background thread owns the workers, so deadlines hold and work continues while the caller is busy. The rules:

- A call past its deadline is `timed_out` and never retried. Its worker is killed and replaced.
- A call that raises, or whose worker dies or is stopped (SIGSTOP) during it, is retried once, on another worker. A second failure is
  reported with the traceback.
- The other calls of a killed worker go back to the queue. They do not count as failed.

Calls are sent in batches and answered one by one, so the first unanswered call of a worker is the one it is running.
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
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import burnish
from burnish.config.errors import UserError
from burnish.rewards.score_types import PartResult
from burnish.rewards.worker import FrameReader, WorkerSetup
from burnish.run.supervisor.processes import is_stopped
from burnish.sandbox.rpc import frame

logger = logging.getLogger(__name__)

MAX_CALLS_PER_MESSAGE = 32  # enough to make messages cheap, few enough to spread the last calls evenly
MAX_FAILED_STARTS = 3
MAX_REPLY_BYTES = 1 << 24
START_TIMEOUT_S = 120.0  # generous, because a user's module may load a model
KILL_TIMEOUT_S = 10.0  # how long to wait for a process to be gone after SIGKILL
SEND_TIMEOUT_S = 10  # a ready worker reads at once


@dataclass
class ScoringCall:
    """One call of one part's scorer, with one request or, for a batch function, several."""

    part: int
    tickets: tuple[int, ...]  # the caller's numbers of the requests
    payload: bytes  # the requests, pickled
    failures: int = 0
    avoid: int | None = None  # the worker it failed on


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call: results (one per request), a timeout, or the error of its second failure."""

    call: ScoringCall
    results: list[PartResult] | None = None
    timed_out: bool = False
    error: str | None = None


OutcomeQueue = queue.SimpleQueue[CallOutcome | BaseException]


@dataclass
class WorkerProcess:
    """A running worker process and its unanswered calls. It is running the first of them. No method blocks without a bound."""

    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    lifeline: int
    deadline: float
    is_ready: bool = False
    calls: deque[tuple[int, ScoringCall]] = field(default_factory=deque)  # (serial number, call)
    frames: FrameReader = field(default_factory=lambda: FrameReader(MAX_REPLY_BYTES))

    @property
    def owes_message(self) -> bool:
        """Whether it owes a message: that it is ready, or the answer to a call."""
        return not self.is_ready or bool(self.calls)

    def send(self, body: bytes) -> None:
        """Send a message; OSError if the worker is gone or does not read."""
        self.channel.sendall(frame(body))

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the messages that have arrived, without waiting, and whether the connection is still open."""
        bodies: list[bytes] = []
        while True:
            try:
                data = self.channel.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return bodies, True
            except ConnectionError:
                return bodies, False
            if not data:
                return bodies, False
            bodies += self.frames.feed(data)

    def kill(self) -> int:
        """Kill the worker and its children, reap it, and return its exit status (its own if it had ended before)."""
        with contextlib.suppress(ProcessLookupError):  # no process is left in the group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        os.close(self.lifeline)
        try:
            return self.process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel, such as on a lost network disk
            return -signal.SIGKILL


def start_worker(number: int, setup: WorkerSetup, directory: str) -> WorkerProcess:
    """Start a worker in a session of its own. It is ready once it has sent its `ready` message."""
    ours, theirs = socket.socketpair()
    # A timeout for sending only; `settimeout` would also apply to receiving.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
    lifeline_theirs, lifeline_ours = os.pipe()
    root = str(Path(burnish.__file__).parents[1])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    # -P: a file in the working directory must not shadow a module of the standard library
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "burnish.rewards.worker", str(theirs.fileno()), str(lifeline_theirs)],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(), lifeline_theirs),
        start_new_session=True,
        cwd=directory,
        env={**os.environ, **threads, "PYTHONPATH": path},
    )
    theirs.close()
    os.close(lifeline_theirs)
    worker = WorkerProcess(number, process, ours, lifeline_ours, time.monotonic() + START_TIMEOUT_S)
    with contextlib.suppress(OSError):  # the process has ended already; the next read notices it
        worker.send(pickle.dumps(setup))
    return worker


def describe_exit(status: int) -> str:
    """Describe an exit status in words."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


class WorkerPool:
    """Worker processes that have loaded the same parts. Outcomes are put into the given queue, in any order.

    A worker that cannot start is fatal: the error is put into that queue in place of an outcome, and the pool ends.
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
        self._wake_reader, self._wake_writer = socket.socketpair()  # wakes the thread from its wait
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="burnish-rewards", daemon=True)
        self._thread.start()

    def submit(self, calls: Sequence[ScoringCall]) -> None:
        """Queue calls; return at once."""
        for call in calls:
            self._inbox.put(call)
        self._wake()

    def close(self) -> None:
        """Kill and reap every worker. Unfinished calls get no outcome."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the buffer is full of wake-ups, so the thread will wake anyway
            self._wake_writer.send(b"!", socket.MSG_DONTWAIT)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for _ in range(self._num_workers):
                self._start()
            while not self._is_closing:
                self._dispatch()
                for key, _ in self._selector.select(self._select_timeout_s()):
                    if key.fileobj is self._wake_reader:
                        self._wake_reader.recv(4096)
                    elif key.data in self._workers:
                        self._read(key.data)
                while not self._inbox.empty():
                    self._waiting.append(self._inbox.get_nowait())
                self._enforce_deadlines()
        except BaseException as error:  # noqa: BLE001 - passed to the caller's thread, which raises it
            self._outcomes.put(error)
        finally:
            for worker in self._workers:
                worker.kill()
            self._selector.close()

    def _start(self) -> None:
        worker = start_worker(next(self._numbers), self._setup, self._directory)
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _select_timeout_s(self) -> float | None:
        deadlines = [w.deadline for w in self._workers if w.owes_message]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _dispatch(self) -> None:
        """Send waiting calls to idle workers. Batches shrink as the queue empties, so that all workers finish together."""
        for worker in list(self._workers):
            if worker.owes_message or not self._waiting:
                continue
            share = min(MAX_CALLS_PER_MESSAGE, math.ceil(len(self._waiting) / (2 * self._num_workers)))
            worker.calls.extend((next(self._serials), call) for call in self._next_calls(share, worker))
            worker.deadline = time.monotonic() + self._setup.timeout_s
            try:
                worker.send(pickle.dumps([(serial, call.part, call.payload) for serial, call in worker.calls]))
            except OSError:  # it died while idle, so none of these calls has run
                self._replace(worker, blame=False)

    def _next_calls(self, share: int, worker: WorkerProcess) -> list[ScoringCall]:
        """The next calls for a worker. Calls that failed on it are left to other workers, if there are any."""
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
                self._handle_message(worker, json.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            # Only code that an answer smuggled into the worker can make it send a malformed message.
            self._replace(worker, reason=f"the scoring process sent an unreadable reply ({error})")
        else:
            if not is_open:
                self._replace(worker)

    def _handle_message(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if "failed" in message:
            raise UserError(message["failed"])
        if not worker.is_ready:
            worker.is_ready = bool(message["ready"])
            self._failed_starts = 0
            if self._setup.isolated and not message["offline"] and not self._has_warned:
                self._has_warned = True
                logger.warning("verifier processes keep network access: this system does not allow them to give it up")
            return
        serial, call = worker.calls[0]
        if message["serial"] != serial:
            raise ValueError(f"it answers call {message['serial']} while running {serial}")
        late = message["elapsed_s"] > self._setup.timeout_s
        results = [_parse_result(*r) for r in message["results"]] if "results" in message else None
        if results is not None and len(results) != len(call.tickets):
            raise ValueError(f"{len(results)} results for {len(call.tickets)} requests")
        worker.calls.popleft()
        worker.deadline = time.monotonic() + self._setup.timeout_s
        if late:  # it finished just before the kill: the outcome is the same as just after it
            self._outcomes.put(CallOutcome(call, timed_out=True))
        elif results is None:
            self._fail(call, worker, message["error"])
        else:
            self._outcomes.put(CallOutcome(call, results))

    def _enforce_deadlines(self) -> None:
        for worker in list(self._workers):
            if worker.owes_message and time.monotonic() > worker.deadline:
                self._read(worker)  # its answer may have arrived while this thread did not run
                if worker not in self._workers or time.monotonic() <= worker.deadline or not worker.owes_message:
                    continue
                if is_stopped(worker.process.pid):  # not the fault of the call it was running
                    for _, call in list(worker.calls)[:1]:
                        worker.calls.popleft()
                        self._fail(call, worker, "the scoring process was stopped by a signal during this call")
                elif not worker.is_ready:
                    raise UserError(
                        f"a scoring process was not ready {START_TIMEOUT_S:.0f} s after its start: {self._part_names()}"
                    )
                else:
                    self._outcomes.put(CallOutcome(worker.calls.popleft()[1], timed_out=True))
                self._replace(worker, blame=False)

    # --- failures ----------------------------------------------------------------------------------------------------

    def _replace(self, worker: WorkerProcess, blame: bool = True, reason: str | None = None) -> None:
        """Replace a worker and requeue its calls. With `blame`, the call that it was running counts as failed."""
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        status = worker.kill()
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                raise UserError(
                    f"{MAX_FAILED_STARTS} scoring processes in a row ended before they were ready; the last one "
                    f"{describe_exit(status)} while loading {self._part_names()}. If it ran out of memory, raise "
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

    def _part_names(self) -> str:
        return ", ".join(part.name for part in self._setup.parts.values())


def _parse_result(
    value: float | None,
    accuracy: float | None,
    parts: dict[str, float],
    details: str,
    timed_out: bool,
    extra: dict[str, Any],
) -> PartResult:
    """Parse a result that a worker sent; ValueError or TypeError if it is malformed."""
    as_floats = {key: float(number) for key, number in parts.items()}
    return PartResult(
        None if value is None else float(value),
        None if accuracy is None else float(accuracy),
        as_floats,
        str(details),
        bool(timed_out),
        extra={str(column): _checked_log_value(logged) for column, logged in extra.items()},
    )


def _checked_log_value(logged: Any) -> Any:
    """Check a value that a function logged; ValueError for anything but a number, a boolean, None or a text."""
    if logged is not None and not isinstance(logged, bool | int | float | str):
        raise ValueError(f"a {type(logged).__name__} is not a value to log")
    return logged
