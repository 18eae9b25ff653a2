"""The runner's end of one worker process: starting it, sending requests, reading its output, noticing its end, and killing it.

A link lives in the runner's event loop. Every request gets its reply or `WorkerGone`. A process that is alive but whose event loop does not
answer is asked for its stacks and killed: a method that blocks the loop, or that holds Python's lock in C code, cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import burnish
from burnish.environments.wire import MARK, MAX_REPLY_BYTES, NO_REQUEST, MessageReader, frame
from burnish.environments.worker_output import OUTPUT_WAIT_S, OnOutput, WorkerOutput
from burnish.run.supervisor.processes import is_stopped, kill_all_with_variable, out_of_memory_kills

START_TIMEOUT_S = 60.0
HEARTBEAT_S = 1.0
"""How often a worker with unanswered requests is asked whether it is alive."""
EXIT_WAIT_S = 2.0
"""How long a process may take to end after its connection has closed."""
KILL_TIMEOUT_S = 10.0
"""How long to wait for a process to be gone after SIGKILL."""
NAME_VARIABLE = "BURNISH_WORKER"
"""Environment variable with a name of each process, by which its descendants are found."""
EndCause = Literal["ended", "died", "blocked", "out_of_memory"]
"""Why a process is gone: the pool ended it, it died, it did not answer and was killed, or memory ran out."""


class WorkerEnd(NamedTuple):
    """The end of a worker process."""

    text: str
    cause: EndCause


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of one worker process."""

    memory_gib: float = 4.0
    """Address space of the process. User code that asks for more gets a MemoryError."""
    max_threads: int = 256
    """Plain (not `async`) methods that run at once. Further calls wait in order."""
    max_reply_bytes: int = MAX_REPLY_BYTES
    unresponsive_s: float = 30.0
    """A worker whose event loop does not answer for so long is killed."""


class WorkerGone(Exception):
    """The worker process has ended. The text says how, with its last lines of output."""

    def __init__(self, reason: str, is_to_blame: bool = False) -> None:
        super().__init__(reason)
        self.is_to_blame = is_to_blame
        """Whether the request blocked the process, which was killed for it."""


class Link(Protocol):
    """What a pool needs of a worker process, wherever it runs."""

    gone: asyncio.Future[WorkerEnd]
    """How it ended, once the process is gone."""

    @property
    def is_ending(self) -> bool:
        """Whether the process has ended or is being ended."""

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its reply; `WorkerGone` if the process ends before."""

    def kill(self, reason: str) -> None:
        """End the process and its children. `gone` tells when that is done."""


@dataclass(frozen=True)
class _Pending:
    """A request without a reply."""

    future: asyncio.Future[dict[str, Any]]
    due: float
    """When it is late."""


class WorkerLink(asyncio.Protocol):
    """One worker process. Make it with `start_worker`."""

    def __init__(
        self,
        number: int,
        process: subprocess.Popen[bytes],
        lifeline: int,
        marks: int,
        limits: WorkerLimits,
        on_output: OnOutput | None,
        variable: str,
    ) -> None:
        """`variable` is in the environment of the process, and so of all that it starts."""
        loop = asyncio.get_running_loop()
        self.number = number
        self.process = process
        self.gone: asyncio.Future[WorkerEnd] = loop.create_future()
        self._lifeline, self._marks, self._variable = lifeline, marks, variable
        self._limits = limits
        self._ids = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._reader = MessageReader(self._receive, 2 * limits.max_reply_bytes + (1 << 20))
        self._transport: asyncio.WriteTransport | None = None
        self._output = WorkerOutput(on_output)
        self._output_transport: asyncio.BaseTransport | None = None
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._pidfd: int | None = None
        self._memory_kills = out_of_memory_kills()

    async def connect(self, channel: socket.socket, output: int) -> None:
        """Attach to the socket, the output and the end of the process."""
        loop = asyncio.get_running_loop()
        self._output_transport, _ = await loop.connect_read_pipe(lambda: self._output, os.fdopen(output, "rb", 0))
        await loop.create_connection(lambda: self, sock=channel)
        with contextlib.suppress(AttributeError, OSError):  # not Linux: the closed socket tells it
            self._pidfd = os.pidfd_open(self.process.pid)
            loop.add_reader(self._pidfd, self.kill)
        self._watching = asyncio.create_task(self._watch())

    @property
    def is_ending(self) -> bool:
        """Whether the process has ended or is being ended."""
        return self._ending is not None

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its reply; `WorkerGone` if the process ends before."""
        assert self._transport is not None
        if self._transport.is_closing():
            self.kill()
        if self.is_ending:
            raise WorkerGone((await asyncio.shield(self.gone)).text)
        number = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(future, time.monotonic() + message.get("deadline_s", math.inf))
        self._transport.write(frame({"id": number, **message}))
        try:
            return await future
        finally:
            self._pending.pop(number, None)

    def kill(self, reason: str | None = None, cause: EndCause = "ended") -> None:
        """End the process and its children; without a reason, because it has ended by itself. `gone` tells when that is done."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(reason, cause))

    # --- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except (ValueError, LookupError) as error:  # only user code that writes to the socket can cause it
            self.kill(f"sent an unreadable message ({error})", "died")

    def connection_lost(self, error: Exception | None) -> None:
        self.kill()

    def _receive(self, message: dict[str, Any]) -> None:
        pending = self._pending.get(message["id"])
        if pending is not None and not pending.future.done():
            pending.future.set_result(message)

    # --- the end of the process ----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Kill the process if it has requests and does not answer."""
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, self._limits.unresponsive_s))
            if not self._pending:
                continue
            pong = asyncio.create_task(self.request({"do": "ping"}))
            pong.add_done_callback(lambda task: task.cancelled() or task.exception())  # also if this task is cancelled
            await asyncio.wait([pong], timeout=self._limits.unresponsive_s)
            if not pong.done():  # if this loop was blocked itself, the answer is waiting to be read
                await asyncio.wait([pong], timeout=min(HEARTBEAT_S, self._limits.unresponsive_s))
            if pong.done():
                if pong.exception() is not None:
                    return
                continue
            pong.cancel()
            is_paused = is_stopped(self.process.pid)
            if is_paused:
                why = "was stopped by a signal"
            else:
                why = "did not answer: a method blocks the event loop (`time.sleep` or a long computation in an `async def`?) or holds Python's lock"
                await self._output.ask_for_stacks(self.process.pid)
            why = f"{why}, for {self._limits.unresponsive_s:g} s, and was killed"
            self.kill(why, "died" if is_paused else "blocked")
            return

    async def _end(self, reason: str | None, cause: EndCause) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        has_ended_itself = reason is None
        if reason is None and not await self._has_exited():
            reason = "closed its connection and was killed (does user code close file descriptors?)"
        with contextlib.suppress(ProcessLookupError):  # no process is left in its group
            os.killpg(self.process.pid, signal.SIGKILL)
        await asyncio.to_thread(kill_all_with_variable, self._variable)  # those that left the group
        status = await asyncio.to_thread(_wait, self.process, KILL_TIMEOUT_S)
        await asyncio.wait([self._output.ended], timeout=OUTPUT_WAIT_S)
        blamed = self._requests_to_blame() if cause == "blocked" else set()
        os.close(self._lifeline)
        os.close(self._marks)
        if self._transport is not None:
            self._transport.abort()
        if self._output_transport is not None:
            self._output_transport.close()  # a program that user code started may still hold the other end
        if has_ended_itself:
            cause = "out_of_memory" if out_of_memory_kills() > self._memory_kills else "died"
        text = self._describe(reason or self._exit_text(status, cause))
        for number, pending in self._pending.items():
            if not pending.future.done():
                pending.future.set_exception(WorkerGone(text, number in blamed))
        self.gone.set_result(WorkerEnd(text, cause))

    async def _has_exited(self) -> bool:
        """Whether the process ends by itself in a moment. It is not reaped, so that its id and its group stay its own."""
        until = time.monotonic() + EXIT_WAIT_S
        while time.monotonic() < until:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            await asyncio.sleep(0.01)
        return False

    def _requests_to_blame(self) -> set[int]:
        """The request that the event loop was running; if it was none, a thread holds Python's lock: those that are late."""
        (running,) = MARK.unpack(os.pread(self._marks, MARK.size, 0))
        if running in self._pending:
            return {running}
        return {number for number, pending in self._pending.items() if time.monotonic() > pending.due}

    def _exit_text(self, status: int | None, cause: EndCause) -> str:
        if status is None:  # stuck in the kernel, such as on a lost network disk
            return "was killed and does not end"
        if status >= 0:
            return f"exited with status {status} (did user code call os._exit?)"
        text = f"was killed by {signal.Signals(-status).name}"
        if cause == "out_of_memory":
            text += ": the machine or its container ran out of memory"
        return text

    def _describe(self, what: str) -> str:
        lines = "\n".join(f"  | {line}" for line in self._output.lines)
        return f"environment worker {self.number} {what}" + (f"; its last output:\n{lines}" if lines else "")


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit status of a process, or None if it has not ended."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


async def start_worker(number: int, limits: WorkerLimits, on_output: OnOutput | None = None) -> WorkerLink:
    """Start a worker process in a session of its own, and wait until it is ready; `WorkerGone` if it does not get there.

    `on_output` takes what it prints. Without it, only error messages show the last lines.
    """
    try:
        return await _started_worker(number, limits, on_output)
    except OSError as error:  # such as too many open files
        raise WorkerGone(f"environment worker {number} could not be started: {error}") from error


async def _started_worker(number: int, limits: WorkerLimits, on_output: OnOutput | None) -> WorkerLink:
    with contextlib.ExitStack() as theirs:
        channel, their_channel = socket.socketpair()
        theirs.enter_context(their_channel)
        name = secrets.token_hex(8)
        their_lifeline, lifeline = os.pipe()
        output, their_output = os.pipe()
        theirs.callback(os.close, their_lifeline)
        theirs.callback(os.close, their_output)
        with tempfile.TemporaryFile() as marks:
            marks.write(MARK.pack(NO_REQUEST))
            marks.flush()
            try:
                process = _spawn((their_channel.fileno(), their_lifeline, marks.fileno()), their_output, name)
            except OSError:
                channel.close()
                os.close(lifeline)
                os.close(output)
                raise
            variable = f"{NAME_VARIABLE}={name}"
            link = WorkerLink(number, process, lifeline, os.dup(marks.fileno()), limits, on_output, variable)
    channel.setblocking(False)
    await link.connect(channel, output)
    setup = {
        "memory_gib": limits.memory_gib,
        "max_threads": limits.max_threads,
        "max_reply_bytes": limits.max_reply_bytes,
    }
    try:
        await asyncio.wait_for(link.request(setup), START_TIMEOUT_S)
    except TimeoutError:
        link.kill(f"was not ready {START_TIMEOUT_S:g} s after its start", "died")
        raise WorkerGone((await link.gone).text) from None
    return link


def _spawn(descriptors: tuple[int, ...], output: int, name: str) -> subprocess.Popen[bytes]:
    root = str(Path(burnish.__file__).parents[1])
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables["MALLOC_ARENA_MAX"] = "2"  # an arena for each thread would use up the address space
    variables["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    variables[NAME_VARIABLE] = name
    # -P: a file in the working directory must not shadow a module of the standard library. -u: output arrives before a death.
    return subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", "burnish.environments.worker_process", *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=descriptors,
        start_new_session=True,
        env={**os.environ, **variables},
    )
