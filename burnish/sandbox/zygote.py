"""The zygote: the process that all programs of a worker are forked from, and the supervisor that watches one run.

    python -c '... zygote.main()' SOCKET isolated|unsafe LIMITS runs|sessions [TOOLCHAIN]

The zygote has Python started and the standard library loaded, and is already inside the sandbox. It starts with an empty environment, so
there is nothing to find in its memory. It is the first process of a pid namespace, so nothing outlives it.

It never reads a program itself. For each run it forks a supervisor, which starts the program's process and, for tests that call the
program, the grader's process. Both are started before the supervisor has read what they are to run, and each receives its own part only:
a program finds no test in its memory, not even an old one. The supervisor watches from outside their namespaces: what they write, what
they use, and the time.

A request is three messages: the kind and the time limit; the program's part; the grader's part or the standard input. The reply is two
messages. `started` is sent right before the processes receive their parts. A failure before it cannot be caused by the program; a failure
after it can. The second message says how the run ended.

A zygote for sessions (burnish.sandbox.session_supervisor) serves many at once, each over a socket of its own.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.sandbox import confined_process, grader_process, namespaces, program_process, session_supervisor
from burnish.sandbox.confined_process import ConfinedProcess, SandboxContext, SetupFailed
from burnish.sandbox.limits import OWN_PROCESSES, Limits
from burnish.sandbox.namespaces import STANDARD_LIBRARY
from burnish.sandbox.rpc import HEADER, receive_exactly, receive_message, send_message
from burnish.sandbox.toolchain import Toolchain

PRELOADED_MODULES = """
abc array base64 bisect bz2 calendar cmath collections concurrent.futures contextlib copy ctypes dataclasses datetime decimal difflib
enum fractions functools gzip hashlib heapq inspect io itertools json lzma math numbers operator pickle pprint queue random re secrets
select shutil signal socket sqlite3 statistics string struct tempfile textwrap threading traceback types typing unicodedata uuid warnings
weakref xml.etree.ElementTree zlib
"""
NOT_PRELOADED = ("_test", "xx", "_xx", "_tkinter", "readline", "_ctypes_test", "_curses", "_gdbm", "_dbm", "nis")
SANDBOX_OOM_SCORE = 900
LEFTOVER_TIMEOUT_S = 5.0
CHECK_INTERVAL_S = 0.05  # how often the memory and CPU time of a program and its children are summed
MAX_STDERR_BYTES = 2_000
EXHAUSTION_ERRNOS = {errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC}
"""Errors of the supervisor that a greedy program can cause."""
CHANNEL_FD, SPEC_FD, VERDICTS_FD = 3, 4, 5


# --- the zygote ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Enter the sandbox, report that it is ready, and serve runs."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    is_isolated = sys.argv[2] == "isolated"
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # the worker's soft limit is for one of its calls only
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the trainer ends its workers in order
    try:
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the worker")
        _set_sandbox_oom_score()
        preload()
        processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if is_isolated:
            namespaces.enter_sandbox(Toolchain.from_json(sys.argv[5]) if len(sys.argv) > 5 else None)
            _fork_into_pid_namespace(channel)
        context = SandboxContext(
            limits=Limits(**json.loads(sys.argv[3])),
            is_isolated=is_isolated,
            processes=processes,
            pid_namespace=os.open("self/ns/pid", os.O_RDONLY, dir_fd=processes),
        )
        # Fail now if the kernel does not list children: without that list, total memory and CPU time could not be limited.
        confined_process.children_of(confined_process.own_pid(processes), processes)
    except OSError as error:
        send_message(channel, {"failed": str(error)})
        return
    sys.path[:] = [folder for folder in sys.path if folder.startswith(STANDARD_LIBRARY)]
    gc.collect()
    gc.freeze()  # keeps what is loaded shared with every fork
    send_message(channel, {"ready": True})
    serve = serve_runs if sys.argv[4] == "runs" else session_supervisor.serve_sessions
    serve(channel, context)


def preload() -> None:
    """Import what programs often use, and every extension module: their system libraries are not visible in the sandbox."""
    names = PRELOADED_MODULES.split()
    for folder in sys.path:
        if os.path.basename(folder) == "lib-dynload" and os.path.isdir(folder):
            names += [f.split(".")[0] for f in os.listdir(folder) if f.endswith(".so")]
    for name in names:
        if not name.startswith(NOT_PRELOADED):
            with contextlib.suppress(ImportError):  # Python can be built without some of them
                importlib.import_module(name)


def _set_sandbox_oom_score() -> None:
    """If the machine runs out of memory, the kernel kills a program first (PROGRAM_OOM_SCORE), then a sandbox, then the trainer."""
    score = Path("/proc/self/oom_score_adj")
    score.write_text(str(max(SANDBOX_OOM_SCORE, int(score.read_text()))))  # lowering it needs a privilege


def _fork_into_pid_namespace(channel: socket.socket) -> None:
    """Continue as the first process of the new pid namespace. The old process only waits for it."""
    first = os.fork()
    if first == 0:
        # Entering the namespace changed the process's privileges, which resets this setting.
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the worker")
        return
    namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the worker")
    channel.close()
    os.closerange(3, 256)
    os.waitpid(first, 0)
    os._exit(0)


def serve_runs(channel: socket.socket, context: SandboxContext) -> None:
    """Serve one run after the other, until the worker closes the connection."""
    while True:
        try:
            request: dict[str, Any] = receive_message(channel)
        except EOFError:
            return
        supervisor = os.fork()
        if supervisor == 0:
            try:
                supervise_run(context, channel, request["kind"], request["wall_s"])
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 - an error of the sandbox, reported to the worker
                text = str(error) if isinstance(error, SetupFailed) else traceback.format_exc()
                send_message(channel, {"failed": text, "is_exhaustion": is_exhaustion(error)})
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
        if context.is_isolated:
            _kill_leftovers()
        if status < 0:
            text = f"the supervisor of the run was killed by {signal.Signals(-status).name}"
            send_message(channel, {"failed": text, "is_exhaustion": True})
        if status != 0:
            return  # messages for that run may still be unread in the channel, so the worker starts another zygote


def _kill_leftovers() -> None:
    """Kill and reap what a supervisor that died early has left in this pid namespace."""
    if os.getpid() != 1:
        raise RuntimeError("not the first process of a pid namespace: this would kill the user's other processes")
    end = time.monotonic() + LEFTOVER_TIMEOUT_S
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


# --- the supervisor --------------------------------------------------------------------------------------------------


def supervise_run(context: SandboxContext, channel: socket.socket, kind: str, wall_s: float) -> None:
    """Run what comes over the channel next, and report how it ended."""
    namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the zygote")
    if not context.is_isolated:
        namespaces.prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1, step="adopt orphans")
    run = ProgramRun(context, wall_s)
    spec_sockets = run.start(kind)
    program_spec = receive_message(channel)
    (size,) = HEADER.unpack(receive_exactly(channel, HEADER.size))
    grader_spec_or_stdin = receive_exactly(channel, size)
    send_message(channel, {"started": True})
    with contextlib.suppress(BrokenPipeError):  # the process died before it read; `watch` reports how
        send_message(spec_sockets[0], program_spec)
    if kind == "stdio":
        run.feed(grader_spec_or_stdin)
    else:
        with contextlib.suppress(BrokenPipeError):
            send_message(spec_sockets[1], json.loads(grader_spec_or_stdin))
    for spec_socket in spec_sockets:
        spec_socket.close()
    send_message(channel, run.watch())


def is_exhaustion(error: BaseException) -> bool:
    """Whether the program can have caused a failure of the supervisor, by using up what both need."""
    if isinstance(error, OSError):
        return error.errno in EXHAUSTION_ERRNOS
    return isinstance(error, MemoryError | confined_process.CannotKill)


@dataclass
class Streams:
    """Data read from, and still to be written to, the processes of a run."""

    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    verdicts: bytearray = field(default_factory=bytearray)
    input: memoryview = field(default_factory=lambda: memoryview(b""))


class ProgramRun:
    """One run of a program, alone (`stdio`) or with a grader (`calls`)."""

    def __init__(self, context: SandboxContext, wall_s: float) -> None:
        self._context = context
        self._deadline = time.monotonic() + wall_s
        self._cpu_s = wall_s
        self._next_check = time.monotonic() + CHECK_INTERVAL_S
        self._selector = selectors.DefaultSelector()
        self._streams = Streams()
        self._children: list[ConfinedProcess] = []  # the program's process, then the grader's
        own_pid = confined_process.own_pid(context.processes)
        self._shared_bytes = confined_process.resident_bytes(own_pid, context.processes)

    def start(self, kind: str) -> list[socket.socket]:
        """Start the processes for this kind of run. Each waits for what it is to run on one of the returned sockets."""
        output, errors, verdicts = (self._pipe(stream) for stream in ("output", "errors", "verdicts"))
        if kind == "stdio":
            stdin, self._stdin = os.pipe()
            os.set_blocking(self._stdin, False)
            spec_sockets = [self._start(_stdio_role, {0: stdin, 1: output, 2: errors})]
            os.close(stdin)
        else:
            program_end, grader_end = socket.socketpair()
            with program_end, grader_end:
                spec_sockets = [
                    self._start(_calls_role, {1: output, 2: errors, CHANNEL_FD: program_end.fileno()}),
                    self._start(_grader_role, {CHANNEL_FD: grader_end.fileno(), VERDICTS_FD: verdicts}),
                ]
        for descriptor in (output, errors, verdicts):
            os.close(descriptor)
        return spec_sockets

    def _start(self, role: Callable[[], None], descriptors: dict[int, int]) -> socket.socket:
        """Start one confined process; what it is to run is sent through the returned socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = {**descriptors, SPEC_FD: theirs.fileno()}
            child = confined_process.start_confined(self._context, descriptors, self._cpu_s, role)
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        return ours

    def _pipe(self, stream: str) -> int:
        reader, writer = os.pipe()
        self._selector.register(reader, selectors.EVENT_READ, stream)
        return writer

    def feed(self, data: bytes) -> None:
        """Set the program's standard input."""
        self._streams.input = memoryview(data)
        self._selector.register(self._stdin, selectors.EVENT_WRITE, "input")

    def watch(self) -> dict[str, Any]:
        """Wait until the run ends or passes a limit; return how it ended and what it wrote."""
        reason = None
        while reason is None:
            events = self._selector.select(min(CHECK_INTERVAL_S, max(0.0, self._deadline - time.monotonic())))
            for key, _ in events:
                reason = reason or self._handle(key)
            reason = reason or self._passed_limit()
        for child in self._children:
            child.kill()
        if not self._context.is_isolated:
            confined_process.kill_descendants(self._context)
        for child in self._children:
            child.clean_up()
        self._drain()
        streams = self._streams
        return {
            "ended": reason,
            "status": self._children[0].status,
            # A program that did not end by itself has failed, whatever it printed.
            "output": bytes(streams.output).decode(errors="replace") if reason == "ended" else "",
            "errors": bytes(streams.errors[-MAX_STDERR_BYTES:]).decode(errors="replace"),
            "verdicts": [json.loads(line) for line in bytes(streams.verdicts).splitlines() if line.endswith(b"}")],
        }

    def _handle(self, key: selectors.SelectorKey) -> str | None:
        if isinstance(key.data, ConfinedProcess):
            self._selector.unregister(key.fd)
            key.data.reap()
            if key.data.status == -signal.SIGKILL and self._context.is_isolated:
                # The first process of a namespace cannot be killed from inside it: the machine ran out of memory.
                return "memory"
            # When the program ends, the grader sees its channel close and ends by itself.
            return "ended" if key.data is self._children[-1] else None
        if key.data == "input":
            self._write(key.fd)
            return None
        return self._read(key.fd, key.data)

    def _read(self, descriptor: int, stream: str) -> str | None:
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._selector.unregister(descriptor)
            return None
        collected: bytearray = getattr(self._streams, stream)
        collected += data
        return "output" if stream != "verdicts" and len(collected) > self._context.limits.output_bytes else None

    def _write(self, descriptor: int) -> None:
        try:
            self._streams.input = self._streams.input[os.write(descriptor, self._streams.input[: 1 << 16]) :]
        except BrokenPipeError:
            self._streams.input = memoryview(b"")
        if not self._streams.input:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _passed_limit(self) -> str | None:
        """The limit that the run has passed, if any."""
        if time.monotonic() >= self._deadline:
            return "time"
        if time.monotonic() < self._next_check:
            return None
        self._next_check = time.monotonic() + CHECK_INTERVAL_S
        own_pid = confined_process.own_pid(self._context.processes)
        used = confined_process.tree_usage(own_pid, self._context.processes, self._shared_bytes)
        if used.memory_bytes > self._context.limits.memory_bytes:
            return "memory"
        if used.tasks > self._context.limits.processes + OWN_PROCESSES:
            return "processes"
        return "cpu" if used.cpu_s > self._cpu_s else None

    def _drain(self) -> None:
        """Read what is still in the pipes of the ended processes."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, str) and key.data != "input":
                os.set_blocking(key.fd, False)
                with contextlib.suppress(BlockingIOError):  # an unkillable process still holds the other end
                    while key.fd in self._selector.get_map() and self._read(key.fd, key.data) is None:
                        pass


# --- the roles of confined processes ---------------------------------------------------------------------------------


def _stdio_role() -> None:
    program_process.run_stdio(_receive_spec()["program"])


def _calls_role() -> None:
    spec = _receive_spec()
    program_process.run_calls(socket.socket(fileno=CHANNEL_FD), spec)


def _grader_role() -> None:
    spec = _receive_spec()
    grader_process.run_grader(socket.socket(fileno=CHANNEL_FD), VERDICTS_FD, spec)
    os._exit(0)


def _receive_spec() -> Any:
    spec_socket = socket.socket(fileno=SPEC_FD)
    spec = receive_message(spec_socket)
    spec_socket.close()
    return spec
