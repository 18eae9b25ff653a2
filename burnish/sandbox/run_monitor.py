"""One run of one program, watched from outside its namespaces: what it writes, what it uses, and the clock.

The program's process and the judge's are started before the keeper has read what they are to run, and each is then told its own part
only: a program finds no test in its memory, not even a stale one. The keeper says `started` right before it tells them. What fails until
then cannot be the program's doing; what fails later can be.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from burnish.sandbox import confined_process, namespaces, program, test_process
from burnish.sandbox.confined_process import Box, Ground
from burnish.sandbox.limits import OWN_PROCESSES
from burnish.sandbox.rpc import HEADER, receive, receive_exactly, send

TICK_S = 0.05  # how often the memory and time of a program and its children are added up
ERROR_TAIL = 2_000
EXHAUSTED = {
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOSPC,
}  # errors that a greedy program can cause
CHANNEL, SPEC, VERDICTS = 3, 4, 5


@dataclass
class Streams:
    """What is read from, and written to, the processes while they run."""

    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    verdicts: bytearray = field(default_factory=bytearray)
    input: memoryview = field(default_factory=lambda: memoryview(b""))


class Run:
    """A program under way, alone (`stdio`) or with a judge (`calls`)."""

    def __init__(self, ground: Ground, wall_s: float) -> None:
        self._ground = ground
        self._end = time.monotonic() + wall_s
        self._cpu_s = wall_s
        self._next_look = time.monotonic() + TICK_S
        self._selector = selectors.DefaultSelector()
        self._streams = Streams()
        self._boxes: list[Box] = []
        self._shared = confined_process.resident_bytes(
            confined_process.number_of_self(ground.processes), ground.processes
        )

    def start(self, kind: str) -> list[socket.socket]:
        """Start the processes for a kind of run; they wait for what they are to run on the sockets returned."""
        output, errors, verdicts = (self._pipe(stream) for stream in ("output", "errors", "verdicts"))
        if kind == "stdio":
            stdin, self._stdin = os.pipe()
            os.set_blocking(self._stdin, False)
            lines = [self._start(_stdio_role, {0: stdin, 1: output, 2: errors})]
            os.close(stdin)
        else:
            left, right = socket.socketpair()
            with left, right:
                lines = [
                    self._start(_calls_role, {1: output, 2: errors, CHANNEL: left.fileno()}),
                    self._start(_judge_role, {CHANNEL: right.fileno(), VERDICTS: verdicts}),
                ]
        for descriptor in (output, errors, verdicts):
            os.close(descriptor)
        return lines

    def _start(self, role: Callable[[], None], descriptors: dict[int, int]) -> socket.socket:
        """One confined process; what it is to run goes into the socket returned."""
        ours, theirs = socket.socketpair()
        with theirs:
            made = confined_process.start(self._ground, {**descriptors, SPEC: theirs.fileno()}, self._cpu_s, role)
        self._boxes.append(made)
        self._selector.register(made.pidfd, selectors.EVENT_READ, made)
        return ours

    def _pipe(self, stream: str) -> int:
        reader, writer = os.pipe()
        self._selector.register(reader, selectors.EVENT_READ, stream)
        return writer

    def feed(self, data: bytes) -> None:
        """What the program finds on its standard input."""
        self._streams.input = memoryview(data)
        self._selector.register(self._stdin, selectors.EVENT_WRITE, "input")

    def watch(self) -> dict[str, Any]:
        """Until it is over, or has to be: how it ended, and what it wrote."""
        reason = None
        while reason is None:
            events = self._selector.select(min(TICK_S, max(0.0, self._end - time.monotonic())))
            for key, _ in events:
                reason = reason or self._handle(key)
            reason = reason or self._overrun()
        for at in self._boxes:
            at.kill()
        if not self._ground.is_isolated:
            confined_process.kill_descendants(self._ground)
        for at in self._boxes:
            at.clean_up()
        self._drain()
        streams = self._streams
        return {
            "ended": reason,
            "status": self._boxes[0].status,
            # A program that did not end by itself has failed, whatever it printed.
            "output": bytes(streams.output).decode(errors="replace") if reason == "ended" else "",
            "errors": bytes(streams.errors[-ERROR_TAIL:]).decode(errors="replace"),
            "verdicts": [json.loads(line) for line in bytes(streams.verdicts).splitlines() if line.endswith(b"}")],
        }

    def _handle(self, key: selectors.SelectorKey) -> str | None:
        if isinstance(key.data, Box):
            self._selector.unregister(key.fd)
            key.data.reap()
            if key.data.status == -signal.SIGKILL and self._ground.is_isolated:
                return (
                    "memory"  # the first process of a namespace cannot be killed from inside: the machine had none left
                )
            # The judge is told by its line that the program has ended, and it ends by itself.
            return "ended" if key.data is self._boxes[-1] else None
        if key.data == "input":
            self._write(key.fd)
            return None
        return self._read(key.fd, key.data)

    def _read(self, descriptor: int, stream: str) -> str | None:
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._selector.unregister(descriptor)
            return None
        kept: bytearray = getattr(self._streams, stream)
        kept += data
        return "output" if stream != "verdicts" and len(kept) > self._ground.limits.output_bytes else None

    def _write(self, descriptor: int) -> None:
        try:
            self._streams.input = self._streams.input[os.write(descriptor, self._streams.input[: 1 << 16]) :]
        except BrokenPipeError:
            self._streams.input = memoryview(b"")
        if not self._streams.input:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _overrun(self) -> str | None:
        """Which limit is passed, if one is."""
        if time.monotonic() >= self._end:
            return "time"
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + TICK_S
        me = confined_process.number_of_self(self._ground.processes)
        used = confined_process.use_of(me, self._ground.processes, self._shared)
        if used.memory_bytes > self._ground.limits.memory_bytes:
            return "memory"
        if used.tasks > self._ground.limits.processes + OWN_PROCESSES:
            return "processes"
        return "cpu" if used.cpu_s > self._cpu_s else None

    def _drain(self) -> None:
        """What is still in the pipes of processes that are gone."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, str) and key.data != "input":
                os.set_blocking(key.fd, False)
                with contextlib.suppress(BlockingIOError):  # somebody unkillable holds the other end, and says nothing
                    while key.fd in self._selector.get_map() and self._read(key.fd, key.data) is None:
                        pass


def _spec() -> Any:
    line = socket.socket(fileno=SPEC)
    spec = receive(line)
    line.close()
    return spec


def _stdio_role() -> None:
    program.run_stdio(_spec()["program"])


def _calls_role() -> None:
    spec = _spec()
    program.run_calls(socket.socket(fileno=CHANNEL), spec)


def _judge_role() -> None:
    spec = _spec()
    test_process.run(socket.socket(fileno=CHANNEL), VERDICTS, spec)
    os._exit(0)


def is_exhaustion(error: BaseException) -> bool:
    """Whether a failure of the keeper is one that the program can have caused, by using up what both need."""
    if isinstance(error, OSError):
        return error.errno in EXHAUSTED
    return isinstance(error, MemoryError | confined_process.CannotKill)


def keep(ground: Ground, channel: socket.socket, kind: str, wall_s: float) -> None:
    """Run what comes over the channel next, and say there how it went."""
    namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the zygote")
    if not ground.is_isolated:
        namespaces.prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1, step="adopt orphans")
    run = Run(ground, wall_s)
    lines = run.start(kind)
    first = receive(channel)
    (size,) = HEADER.unpack(receive_exactly(channel, HEADER.size))
    second = receive_exactly(channel, size)
    send(channel, {"started": True})
    with contextlib.suppress(BrokenPipeError):  # it died before it read: the watch will tell how
        send(lines[0], first)
    if kind == "stdio":
        run.feed(second)
    else:
        with contextlib.suppress(BrokenPipeError):
            send(lines[1], json.loads(second))
    for line in lines:
        line.close()
    send(channel, run.watch())
