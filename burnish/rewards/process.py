"""The pool's handle on one worker process: start, talk, kill. It never waits for a worker without a bound."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import burnish
from burnish.rewards.wire import MAX_REPLY_BYTES, Frames, Setup, frame

START_S = 120.0  # a user's module may load a model before it is ready
KILLED_S = 10.0  # to be gone after SIGKILL
SEND_S = 10  # a worker that is ready reads at once


@dataclass
class Call:
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
    calls: deque[tuple[int, Call]] = field(default_factory=deque)  # with their serial numbers
    frames: Frames = field(default_factory=lambda: Frames(MAX_REPLY_BYTES))

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
            return self.process.wait(KILLED_S)
        except subprocess.TimeoutExpired:  # deep in the kernel (a network disk that is gone): it ends when it can
            return -signal.SIGKILL


def start(number: int, setup: Setup, directory: str) -> WorkerProcess:
    """A new worker in its own session; it counts as ready once it says so."""
    ours, theirs = socket.socketpair()
    # A bound on sending that leaves receiving alone, which `settimeout` would not.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
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
    worker = WorkerProcess(number, process, ours, lifeline_ours, time.monotonic() + START_S)
    with contextlib.suppress(OSError):  # it has ended already, which whoever reads from it will notice
        worker.send(pickle.dumps(setup))
    return worker


def describe_exit(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
