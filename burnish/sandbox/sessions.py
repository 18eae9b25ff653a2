"""Sessions of untrusted Python: the client, for an event loop. Each session executes cells and keeps its variables between them.

    sandbox = SessionSandbox(Limits(max_sessions=100), is_isolated=True, max_running=4)
    session = sandbox.new_session()
    cell = await session.run("x = 2\\nx + 1", wall_s=5.0)      # cell.output == "3\\n"
    session.close()

All sessions of a sandbox are forked from one zygote, so opening one takes milliseconds. An idle session is two processes that sleep, most
of whose memory is shared with the zygote. At most `max_running` cells run at the same time: with more than the machine has cores, cells
would pass their time limits for no reason of their own. The others wait, and their time limit begins when they start.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
from dataclasses import dataclass
from typing import Any

from burnish.sandbox.client import START_TIMEOUT_S, RunLost, SandboxError, no_sandbox_error, start_zygote
from burnish.sandbox.limits import Limits
from burnish.sandbox.rpc import HEADER, MAX_MESSAGE_BYTES, frame

SLACK_S = 10.0
"""How long a cell may take beyond its own time limit before the sandbox counts as broken. Starting a session is part of it."""
SEND_WAIT_S = 0.01
OTHER_OPEN_FILES = 1024
USER, UNSAFE_SETTING = "Python tools", "sandbox=unsafe among the options of the tool or environment"


class TooManySessions(SandboxError):
    """As many sessions are open as the sandbox allows."""


@dataclass(frozen=True)
class CellResult:
    """How a cell ended (see burnish.sandbox.session_supervisor) and what it printed."""

    ended: str
    raised: str | None
    output: str

    @property
    def is_session_over(self) -> bool:
        return self.ended not in ("done", "interrupted")


class SessionSandbox:
    """Opens sessions. Its zygote starts with the first session, and again after a failure. All calls are made in one event loop."""

    def __init__(self, limits: Limits, is_isolated: bool = True, max_running: int = 2) -> None:
        self.limits, self._is_isolated = limits, is_isolated
        self.running = asyncio.Semaphore(max_running)
        self.num_open = 0
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def new_session(self) -> Session:
        """A session. It costs nothing before its first cell."""
        return Session(self)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start the processes of a session; UserError with advice if the system does not allow a sandbox."""
        if self.num_open >= self.limits.max_sessions:
            raise TooManySessions(f"{self.num_open} sessions of Python are open, and max_sessions allows no more")
        self.num_open += 1
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._send_socket(theirs)
            return await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            self.num_open -= 1
            raise

    async def _send_socket(self, theirs: socket.socket) -> None:
        """Hand a socket to the zygote, without blocking the event loop."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                self.close()
                await self._start()
            assert self._channel is not None
            while True:
                try:
                    socket.send_fds(self._channel, [b"s"], [theirs.fileno()])
                    return
                except BlockingIOError:
                    await asyncio.sleep(SEND_WAIT_S)
                except OSError as error:
                    self.close()
                    raise SandboxError(f"the sandbox does not accept a session: {error}") from error

    async def _start(self) -> None:
        # The process is started in this thread, because the kernel kills it when the thread that started it ends.
        _allow_open_files(self.limits.max_sessions)
        self._process, self._channel = start_zygote(self.limits, self._is_isolated, "sessions", USER)
        self._channel.setblocking(False)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                message = await self._receive_first(self._channel)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            self.close()
            raise SandboxError(f"the sandbox does not start: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            self.close()
            raise
        if "failed" in message:
            self.close()
            raise no_sandbox_error(message["failed"], USER, UNSAFE_SETTING)

    @staticmethod
    async def _receive_first(channel: socket.socket) -> dict[str, Any]:
        loop, data = asyncio.get_running_loop(), b""
        while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack_from(data)[0]:
            received = await loop.sock_recv(channel, 1 << 16)
            if not received:
                raise EOFError("its process has ended")
            data += received
        message: dict[str, Any] = json.loads(data[HEADER.size :])
        return message

    def close(self) -> None:
        """Kill the zygote, and with it all sessions."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self._process = self._channel = None


def _allow_open_files(num_sessions: int) -> None:
    """Raise this process's soft limit of open files, as far as the system allows: each session is a socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_sessions + OTHER_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class Session:
    """One confined process that executes cells, one at a time."""

    def __init__(self, sandbox: SessionSandbox) -> None:
        self._sandbox = sandbox
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.is_closed = False

    async def run(
        self, code: str, wall_s: float, has_traceback: bool = True, max_output_bytes: int = 1 << 16
    ) -> CellResult:
        """Execute a cell. RunLost: the sandbox broke, as a program can cause it; SandboxError: it broke by itself.

        The session is closed after an exception, after a cancelled call, and after a cell that ended it.
        """
        cell = {"code": code, "wall_s": wall_s, "has_traceback": has_traceback, "max_output_bytes": max_output_bytes}
        data = json.dumps(cell).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a cell of more than {MAX_MESSAGE_BYTES >> 20} MiB")
        is_kept = False
        async with self._sandbox.running:
            try:
                if self._streams is None:
                    self._streams = await self._sandbox.connect()
                async with asyncio.timeout(wall_s + SLACK_S):
                    reply = await self._exchange(data, *self._streams)
                if "failed" in reply:
                    kind = RunLost if reply["is_exhaustion"] else SandboxError
                    raise kind(f"the sandbox failed: {reply['failed']}")
                result = CellResult(reply["ended"], reply["raised"], reply["output"])
                is_kept = not result.is_session_over
                return result
            except TimeoutError:
                return CellResult("time", None, "")
            except (OSError, EOFError, ValueError, KeyError) as error:
                raise RunLost(f"the sandbox does not answer: {type(error).__name__}: {error}") from error
            finally:
                if not is_kept:
                    self.close()

    @staticmethod
    async def _exchange(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Any]:
        writer.write(frame(data))
        await writer.drain()
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        reply: dict[str, Any] = json.loads(await reader.readexactly(size))
        return reply

    def close(self) -> None:
        """End the session. Its supervisor sees the closed socket and kills every process."""
        self.is_closed = True
        if self._streams is not None:
            self._sandbox.num_open -= 1
            self._streams[1].close()
            self._streams = None
