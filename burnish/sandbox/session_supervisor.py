"""The supervisor of one session: a confined process that executes cells and keeps its variables between them.

The client opens a session by sending a socket to the zygote. The zygote forks a supervisor, which serves the client on that socket:

    client: {"code", "wall_s", "has_traceback", "max_output_bytes"}      one cell
    reply:  {"ended", "raised", "output"}                                how it ended and what it printed
    or:     {"failed", "is_exhaustion"}                                  an error of the sandbox

`ended` is `done` after a cell that ran to its end or raised, and `interrupted` after one that was out of time but could be interrupted. With
any other value (`time`, `memory`, `cpu`, `processes`, `exited`) the session is over, and its variables are lost.

Between two cells all processes of the session are stopped (SIGSTOP), so that a thread a cell has started uses no CPU time unseen. When the
client closes its socket, or dies, the supervisor kills the session.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
import traceback
from typing import Any, NoReturn

from burnish.sandbox import cell_process, confined_process, namespaces
from burnish.sandbox.confined_process import ConfinedProcess, SandboxContext, SetupFailed
from burnish.sandbox.limits import OWN_PROCESSES
from burnish.sandbox.rpc import receive_message, send_message

CHECK_INTERVAL_S = 0.05  # how often the memory and CPU time of a running cell are summed
INTERRUPT_S = 0.5  # how long a cell may take to react to its interruption
MAX_SESSION_CPU_S = 24 * 3600  # of one process, over all cells; the supervisor limits each cell
MAX_STOP_ROUNDS = 20
CHANNEL_FD = 3


def serve_sessions(channel: socket.socket, context: SandboxContext) -> None:
    """In the zygote: fork a supervisor for each socket that arrives, until the client closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors that have ended
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as client:
            try:
                pid = os.fork()
            except OSError as error:  # no memory or too many processes: only this session fails
                send_message(client, {"failed": f"cannot start a session: {error}", "is_exhaustion": True})
                continue
            if pid == 0:
                channel.close()
                _supervise(context, client)


def _supervise(context: SandboxContext, client: socket.socket) -> NoReturn:
    """In the supervisor: serve one session. It never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the zygote")
        if not context.is_isolated:
            namespaces.prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1, step="adopt orphans")
        SessionSupervisor(context, client).serve()
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - an error of the sandbox, reported to the client
        text = str(error) if isinstance(error, SetupFailed) else traceback.format_exc()
        is_exhaustion = isinstance(error, OSError | MemoryError | confined_process.CannotKill)
        with contextlib.suppress(OSError):
            send_message(client, {"failed": text, "is_exhaustion": is_exhaustion})
    finally:
        os._exit(1)


class SessionSupervisor:
    """Starts the confined process of a session, hands it cells, and watches each from outside its namespaces."""

    def __init__(self, context: SandboxContext, client: socket.socket) -> None:
        self._context, self._client = context, client
        own_pid = confined_process.own_pid(context.processes)
        self._shared_bytes = confined_process.resident_bytes(own_pid, context.processes)
        self._channel, theirs = socket.socketpair()
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        with theirs:
            descriptors = {1: writer, 2: writer, CHANNEL_FD: theirs.fileno()}
            self._child: ConfinedProcess = confined_process.start_confined(
                context, descriptors, MAX_SESSION_CPU_S, _cells_role
            )
        os.close(writer)
        self._selector = selectors.DefaultSelector()
        for file, what in (
            (self._reader, "output"),
            (self._channel, "reply"),
            (self._client, "client"),
            (self._child.pidfd, "exit"),
        ):
            self._selector.register(file, selectors.EVENT_READ, what)
        self._output, self._num_bytes, self._max_bytes = bytearray(), 0, 0

    def serve(self) -> None:
        """Run cells until the client closes its socket or the session is over."""
        try:
            while True:
                try:
                    cell = receive_message(self._client)
                except (EOFError, OSError):
                    return
                reply = self._run(cell)
                send_message(self._client, reply)
                if reply["ended"] not in ("done", "interrupted"):
                    return
        finally:
            self._child.kill()
            if not self._context.is_isolated:
                confined_process.kill_descendants(self._context)
            self._child.clean_up()

    def _run(self, cell: dict[str, Any]) -> dict[str, Any]:
        """Run one cell and wait for its end or for a limit."""
        self._output, self._num_bytes, self._max_bytes = bytearray(), 0, int(cell["max_output_bytes"])
        self._signal_all(signal.SIGCONT)
        cpu_before_s = self._usage().cpu_s
        deadline = time.monotonic() + cell["wall_s"]
        is_interrupted, raised = False, None
        try:
            send_message(self._channel, {"code": cell["code"], "has_traceback": cell["has_traceback"]})
        except OSError:  # the process has gone since its last cell
            return self._reply("exited", None)
        ended, next_check = None, time.monotonic() + CHECK_INTERVAL_S
        while ended is None:
            wait_s = min(next_check, deadline) - time.monotonic()
            for key, _ in self._selector.select(max(0.0, wait_s)):
                if key.data == "output":
                    self._read_output()
                elif key.data == "client":
                    raise EOFError("the client has closed the session")
                elif key.data == "exit":
                    ended = ended or "exited"
                else:
                    ended, raised = self._receive_end(is_interrupted)
            now = time.monotonic()
            if ended is None and now >= next_check:
                next_check = now + CHECK_INTERVAL_S
                ended = self._passed_limit(cpu_before_s + cell["wall_s"] + INTERRUPT_S)
            if ended is None and now >= deadline:
                if is_interrupted:
                    ended = "time"
                else:
                    is_interrupted, deadline = True, now + INTERRUPT_S
                    os.kill(self._child.pid, signal.SIGINT)
        if ended in ("done", "interrupted"):
            self._stop_all()
            ended = self._passed_limit(float("inf")) or ended  # what an idle session holds is within its limits too
        if ended not in ("done", "interrupted"):
            self._child.kill()
        self._read_output()
        return self._reply(ended, raised)

    def _receive_end(self, is_interrupted: bool) -> tuple[str, str | None]:
        """Read the process's own report. A report that cannot be read ends the session, because the program has broken it."""
        try:
            raised = receive_message(self._channel)["raised"]
        except (EOFError, OSError, ValueError, KeyError, TypeError, RecursionError):
            return "exited", None
        if is_interrupted and raised == "KeyboardInterrupt":
            return "interrupted", None
        return "done", None if raised is None else str(raised)[:100]

    def _reply(self, ended: str, raised: str | None) -> dict[str, Any]:
        half, cut = self._max_bytes // 2, self._num_bytes - len(self._output)
        if cut:
            mark = f"\n... ({cut} bytes left out) ...\n".encode()
            self._output = self._output[:half] + mark + self._output[half:]
        output = bytes(self._output).decode(errors="replace")
        return {"ended": ended, "raised": raised, "output": output}

    def _read_output(self) -> None:
        """Read what is in the pipe. Of too much output, the first and the last part stay."""
        while True:
            try:
                data = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._reader)
                return
            self._num_bytes += len(data)
            self._output += data
            if len(self._output) > self._max_bytes:
                half = self._max_bytes // 2
                self._output = self._output[:half] + self._output[len(self._output) - (self._max_bytes - half) :]
            if self._num_bytes % (1 << 24) < len(data):
                return  # a program that prints without end must not keep the supervisor from its limits

    def _usage(self) -> confined_process.ResourceUse:
        own_pid = confined_process.own_pid(self._context.processes)
        return confined_process.tree_usage(own_pid, self._context.processes, self._shared_bytes)

    def _passed_limit(self, max_cpu_s: float) -> str | None:
        used, limits = self._usage(), self._context.limits
        if used.memory_bytes > limits.memory_bytes:
            return "memory"
        if used.tasks > limits.processes + OWN_PROCESSES:
            return "processes"
        return "cpu" if used.cpu_s > max_cpu_s else None

    def _stop_all(self) -> None:
        """Stop all processes of the session. A process that is not yet stopped may fork, so the walk is repeated."""
        stopped: set[int] = set()
        for _ in range(MAX_STOP_ROUNDS):
            new = self._signal_all(signal.SIGSTOP) - stopped
            if not new:
                return
            stopped |= new
        self._child.kill()  # it forks faster than it can be stopped; the next cell finds it gone

    def _signal_all(self, number: signal.Signals) -> set[int]:
        """Send a signal to all processes of the session; return their pids as this process sees them."""
        processes = self._context.processes
        own = confined_process.own_pid(processes)
        depth = len(confined_process.namespace_pids(own, processes)) - 1
        found: set[int] = set()
        for process in self._usage().processes:
            with contextlib.suppress(*confined_process.PROCESS_GONE):
                if process != own:
                    pid = confined_process.namespace_pids(process, processes)[depth]
                    os.kill(pid, number)
                    found.add(pid)
        return found


def _cells_role() -> None:
    cell_process.run_cells(socket.socket(fileno=CHANNEL_FD))
