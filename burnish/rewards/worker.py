"""The process that scores: `python -m burnish.rewards.worker SOCKET LIFELINE`, started by burnish.rewards.worker.

It says once that it is ready, then answers batches of calls one reply a call, in order, so that the pool always knows
which call is running. It never retries and keeps no clock: the pool does both, and kills it when a call is overdue.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import burnish
from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin
from burnish.rewards import code_reward, worker_limits
from burnish.rewards.score_types import PartResult, PartSpec, ScoreRequest
from burnish.rewards.user_rewards import call_user_scorer, load_user_scorer
from burnish.rewards.verifiers import VERIFIERS, warm_up
from burnish.sandbox.rpc import HEADER, frame

# --- Messages between the pool and its worker processes: length-prefixed frames on a socket.
#
# Requests travel pickled; replies are JSON, because a worker may have evaluated a hostile answer and nothing it says
# should be able to run code in the trainer.

MAX_REPLY_BYTES = 1 << 24


class WorkerSetup(NamedTuple):
    """The first message to a worker: what it has to load and the limits it puts on itself."""

    parts: dict[int, PartSpec]  # by their index in the reward's list
    base: str | None  # folder of relative plug-in paths
    timeout_s: float
    isolated: bool  # no network and a CPU limit: for built-in verifiers, never for a user's function
    memory_gib: float
    sandbox: str = "namespaces"  # or unsafe: where programs of answers run
    max_steps: int = 0  # of the run, for functions that ask for the trainer's state; 0 outside of training


class FrameReader:
    """Cuts a stream of bytes back into messages; `feed` takes whatever has arrived and returns what is complete."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The messages completed by `data`; ValueError for one longer than the limit."""
        self._buffer += data
        bodies, at = [], 0
        while len(self._buffer) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, at)
            if self._max_bytes is not None and size > self._max_bytes:
                raise ValueError(f"a message of {size} bytes")
            if len(self._buffer) - at - HEADER.size < size:
                break
            at += HEADER.size
            bodies.append(bytes(self._buffer[at : at + size]))
            at += size
        del self._buffer[:at]
        return bodies


PartScorer = Callable[[list[ScoreRequest]], list[PartResult]]
MAX_TRACEBACK_CHARS = 8_000


def load_part(part: PartSpec, base: str | None, max_steps: int = 0) -> PartScorer:
    """The function that scores the requests of one call: one request, or a chunk for a batch function."""
    if is_plugin(part.name):
        where = f"reward part {part.name!r}"
        user = load_user_scorer(part.name, Path(base) if base is not None else None, part.options, where)
        return functools.partial(call_user_scorer, user, options=part.options, max_steps=max_steps)
    warm_up(part.name)
    verifier = VERIFIERS[part.name]
    return lambda requests: [_as_result(verifier(r.completion, r.answer, r.extra, **part.options)) for r in requests]


def _as_result(said: float | PartResult) -> PartResult:
    return said if isinstance(said, PartResult) else PartResult(said)


def run_call(scorer: PartScorer, payload: bytes) -> dict[str, Any]:
    """One call: the results, or the traceback of whatever the scorer raised."""
    try:
        results = scorer(pickle.loads(payload))
        return {
            "results": [(r.value, r.accuracy, dict(r.parts), r.details, r.timed_out, dict(r.extra)) for r in results]
        }
    except BaseException as error:  # noqa: BLE001 - a scorer may even call sys.exit: the pool retries, then reports
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
        text = "".join(traceback.format_exception(type(error), error, trace))
        return {"error": text[-MAX_TRACEBACK_CHARS:]}


def serve_calls(
    channel: socket.socket, frames: FrameReader, scorers: dict[int, PartScorer], setup: WorkerSetup
) -> None:
    """Answer batches until the pool closes the connection."""
    while data := channel.recv(1 << 20):
        for body in frames.feed(data):
            for serial, part, payload in pickle.loads(body):
                if setup.isolated:
                    worker_limits.extend_cpu_limit(setup.timeout_s)
                start = time.monotonic()
                reply = run_call(scorers[part], payload)
                reply |= {"serial": serial, "elapsed_s": time.monotonic() - start}
                channel.sendall(frame(json.dumps(reply).encode()))


def main() -> None:
    """Limit this process, load the parts, and serve."""
    channel, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for descriptor in (channel.fileno(), lifeline):
        os.set_inheritable(descriptor, False)  # a scorer's own children must not hold the pool's connection open
    worker_limits.die_with_parent(lifeline)
    frames = FrameReader()
    bodies: list[bytes] = []
    while not bodies:
        data = channel.recv(1 << 20)
        if not data:
            return
        bodies = frames.feed(data)
    setup: WorkerSetup = pickle.loads(bodies[0])
    is_offline = setup.isolated and worker_limits.leave_network()
    worker_limits.limit_resources(setup.memory_gib)
    code_reward.configure_runner(setup.timeout_s, setup.memory_gib, setup.sandbox != "unsafe")
    try:
        scorers = {index: load_part(part, setup.base, setup.max_steps) for index, part in setup.parts.items()}
    except UserError as error:
        channel.sendall(frame(json.dumps({"failed": str(error)}).encode()))
        return
    if setup.isolated:
        worker_limits.silence_output()
    channel.sendall(frame(json.dumps({"ready": True, "offline": is_offline}).encode()))
    serve_calls(channel, frames, scorers, setup)


# --- The pool's handle on one worker process: start, talk, kill. It never waits for a worker without a bound.

START_TIMEOUT_S = 120.0  # a user's module may load a model before it is ready
KILL_TIMEOUT_S = 10.0  # to be gone after SIGKILL
SEND_TIMEOUT_S = 10  # a worker that is ready reads at once


@dataclass
class ScoringCall:
    """One call of one part's function: one request, or a chunk of them for a batch function."""

    part: int
    tickets: tuple[int, ...]  # the requests, as the caller numbers them
    payload: bytes  # the requests, pickled
    failures: int = 0
    avoid: int | None = None  # the worker it failed on


@dataclass
class WorkerProcess:
    """A running worker and the calls it has been given, the first of which is the one it is at."""

    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    lifeline: int
    deadline: float
    is_ready: bool = False
    calls: deque[tuple[int, ScoringCall]] = field(default_factory=deque)  # with their serial numbers
    frames: FrameReader = field(default_factory=lambda: FrameReader(MAX_REPLY_BYTES))

    @property
    def is_waited_for(self) -> bool:
        """Whether it owes an answer: that it is ready, or that of a call."""
        return not self.is_ready or bool(self.calls)

    def send(self, body: bytes) -> None:
        """Hand over a message; OSError if the worker is gone or does not read."""
        self.channel.sendall(frame(body))

    def receive(self) -> tuple[list[bytes], bool]:
        """The messages that have arrived, without waiting, and whether the connection is still open."""
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
        """End the worker and its children, reap it, and say how it ended (its own exit status if it had one)."""
        with contextlib.suppress(ProcessLookupError):  # nobody is left in the group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        os.close(self.lifeline)
        try:
            return self.process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # deep in the kernel (a network disk that is gone): it ends when it can
            return -signal.SIGKILL


def start_worker(number: int, setup: WorkerSetup, directory: str) -> WorkerProcess:
    """A new worker in its own session; it counts as ready once it says so."""
    ours, theirs = socket.socketpair()
    # A bound on sending that leaves receiving alone, which `settimeout` would not.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
    lifeline_theirs, lifeline_ours = os.pipe()
    root = str(Path(burnish.__file__).parents[1])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    # -P: a file in the working directory must not stand in for a module of the standard library
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
    with contextlib.suppress(OSError):  # it has ended already, which whoever reads from it will notice
        worker.send(pickle.dumps(setup))
    return worker


def describe_exit(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


if __name__ == "__main__":
    main()
