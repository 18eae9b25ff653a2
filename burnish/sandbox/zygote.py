"""The process that every program of a worker is forked from: Python started, the standard library loaded, already in the sandbox.

    python -c '... zygote.main()' SOCKET isolated|unsafe LIMITS

It is started with an empty environment, so there is nothing to find in its memory; it is the first process of a pid namespace,
so nothing outlives it; and it never reads what a program is: a keeper, forked for one run, does. A request is three messages: the kind
and the time; what the program's process is told; what the judge's is told, or standard input. The answer is two: that the program
has started, then how it ended.
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

from burnish.sandbox import confined_process, grader_process, namespaces, program_process
from burnish.sandbox.confined_process import ConfinedProcess, SandboxContext, SetupFailed
from burnish.sandbox.limits import OWN_PROCESSES, Limits
from burnish.sandbox.namespaces import STANDARD_LIBRARY
from burnish.sandbox.rpc import HEADER, receive_exactly, receive_message, send_message

# --- One run of one program, watched from outside its namespaces: what it writes, what it uses, and the clock.
#
# The program's process and the judge's are started before the keeper has read what they are to run, and each is then told its own part
# only: a program finds no test in its memory, not even a stale one. The keeper says `started` right before it tells them. What fails until
# then cannot be the program's doing; what fails later can be.

CHECK_INTERVAL_S = 0.05  # how often the memory and time of a program and its children are added up
MAX_STDERR_BYTES = 2_000
EXHAUSTION_ERRNOS = {
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOSPC,
}  # errors that a greedy program can cause
CHANNEL_FD, SPEC_FD, VERDICTS_FD = 3, 4, 5


@dataclass
class Streams:
    """What is read from, and written to, the processes while they run."""

    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    verdicts: bytearray = field(default_factory=bytearray)
    input: memoryview = field(default_factory=lambda: memoryview(b""))


class ProgramRun:
    """A program under way, alone (`stdio`) or with a judge (`calls`)."""

    def __init__(self, ground: SandboxContext, wall_s: float) -> None:
        self._ground = ground
        self._end = time.monotonic() + wall_s
        self._cpu_s = wall_s
        self._next_look = time.monotonic() + CHECK_INTERVAL_S
        self._selector = selectors.DefaultSelector()
        self._streams = Streams()
        self._boxes: list[ConfinedProcess] = []
        self._shared = confined_process.resident_bytes(confined_process.own_pid(ground.processes), ground.processes)

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
                    self._start(_calls_role, {1: output, 2: errors, CHANNEL_FD: left.fileno()}),
                    self._start(_grader_role, {CHANNEL_FD: right.fileno(), VERDICTS_FD: verdicts}),
                ]
        for descriptor in (output, errors, verdicts):
            os.close(descriptor)
        return lines

    def _start(self, role: Callable[[], None], descriptors: dict[int, int]) -> socket.socket:
        """One confined process; what it is to run goes into the socket returned."""
        ours, theirs = socket.socketpair()
        with theirs:
            made = confined_process.start_confined(
                self._ground, {**descriptors, SPEC_FD: theirs.fileno()}, self._cpu_s, role
            )
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
            events = self._selector.select(min(CHECK_INTERVAL_S, max(0.0, self._end - time.monotonic())))
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
            "errors": bytes(streams.errors[-MAX_STDERR_BYTES:]).decode(errors="replace"),
            "verdicts": [json.loads(line) for line in bytes(streams.verdicts).splitlines() if line.endswith(b"}")],
        }

    def _handle(self, key: selectors.SelectorKey) -> str | None:
        if isinstance(key.data, ConfinedProcess):
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
        self._next_look = time.monotonic() + CHECK_INTERVAL_S
        me = confined_process.own_pid(self._ground.processes)
        used = confined_process.tree_usage(me, self._ground.processes, self._shared)
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


def _receive_spec() -> Any:
    line = socket.socket(fileno=SPEC_FD)
    spec = receive_message(line)
    line.close()
    return spec


def _stdio_role() -> None:
    program_process.run_stdio(_receive_spec()["program"])


def _calls_role() -> None:
    spec = _receive_spec()
    program_process.run_calls(socket.socket(fileno=CHANNEL_FD), spec)


def _grader_role() -> None:
    spec = _receive_spec()
    grader_process.run_grader(socket.socket(fileno=CHANNEL_FD), VERDICTS_FD, spec)
    os._exit(0)


def is_exhaustion(error: BaseException) -> bool:
    """Whether a failure of the keeper is one that the program can have caused, by using up what both need."""
    if isinstance(error, OSError):
        return error.errno in EXHAUSTION_ERRNOS
    return isinstance(error, MemoryError | confined_process.CannotKill)


def supervise_run(ground: SandboxContext, channel: socket.socket, kind: str, wall_s: float) -> None:
    """Run what comes over the channel next, and say there how it went."""
    namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the zygote")
    if not ground.is_isolated:
        namespaces.prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1, step="adopt orphans")
    run = ProgramRun(ground, wall_s)
    lines = run.start(kind)
    first = receive_message(channel)
    (size,) = HEADER.unpack(receive_exactly(channel, HEADER.size))
    second = receive_exactly(channel, size)
    send_message(channel, {"started": True})
    with contextlib.suppress(BrokenPipeError):  # it died before it read: the watch will tell how
        send_message(lines[0], first)
    if kind == "stdio":
        run.feed(second)
    else:
        with contextlib.suppress(BrokenPipeError):
            send_message(lines[1], json.loads(second))
    for line in lines:
        line.close()
    send_message(channel, run.watch())


PRELOADED_MODULES = """
abc array base64 bisect bz2 calendar cmath collections concurrent.futures contextlib copy ctypes dataclasses datetime decimal difflib
enum fractions functools gzip hashlib heapq inspect io itertools json lzma math numbers operator pickle pprint queue random re secrets
select shutil signal socket sqlite3 statistics string struct tempfile textwrap threading traceback types typing unicodedata uuid warnings
weakref xml.etree.ElementTree zlib
"""
SANDBOX_OOM_SCORE = 900
NOT_PRELOADED = ("_test", "xx", "_xx", "_tkinter", "readline", "_ctypes_test", "_curses", "_gdbm", "_dbm", "nis")


def preload() -> None:
    """Load what programs import, and every extension module: the libraries these need are not in the view."""
    names = PRELOADED_MODULES.split()
    for folder in sys.path:
        if os.path.basename(folder) == "lib-dynload" and os.path.isdir(folder):
            names += [f.split(".")[0] for f in os.listdir(folder) if f.endswith(".so")]
    for name in names:
        if not name.startswith(NOT_PRELOADED):
            with contextlib.suppress(ImportError):  # Python can be built without some of them
                importlib.import_module(name)


def main() -> None:
    """Go into the sandbox, say so, and serve."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    is_isolated = sys.argv[2] == "isolated"
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # a worker's soft limit is for one of its calls
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which ends its workers in order
    try:
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the worker")
        _set_sandbox_oom_score()
        preload()
        processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if is_isolated:
            namespaces.enter_sandbox()
            _fork_into_pid_namespace(channel)
        ground = SandboxContext(
            limits=Limits(**json.loads(sys.argv[3])),
            is_isolated=is_isolated,
            processes=processes,
            pid_namespace=os.open("self/ns/pid", os.O_RDONLY, dir_fd=processes),
        )
        confined_process.children_of(
            confined_process.own_pid(processes), processes
        )  # without this, totals would go unwatched
    except OSError as error:
        send_message(channel, {"failed": str(error)})
        return
    sys.path[:] = [folder for folder in sys.path if folder.startswith(STANDARD_LIBRARY)]
    gc.collect()
    gc.freeze()  # what is loaded stays shared with every fork
    send_message(channel, {"ready": True})
    serve_runs(channel, ground)


def _set_sandbox_oom_score() -> None:
    """If the machine runs out of memory, have the kernel end a program first (box.EXPENDABLE), then a sandbox, last the trainer."""
    score = Path("/proc/self/oom_score_adj")
    score.write_text(str(max(SANDBOX_OOM_SCORE, int(score.read_text()))))  # lowering it needs a privilege


def _fork_into_pid_namespace(channel: socket.socket) -> None:
    """Go on as the first process of the new pid namespace; the process that was, waits for it and is nothing else."""
    first = os.fork()
    if first == 0:
        # The rights of the process have just changed, which resets this.
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the worker")
        return
    namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the worker")
    channel.close()
    os.closerange(3, 256)
    os.waitpid(first, 0)
    os._exit(0)


def serve_runs(channel: socket.socket, ground: SandboxContext) -> None:
    """One run after the other, until the worker hangs up."""
    while True:
        try:
            request: dict[str, Any] = receive_message(channel)
        except EOFError:
            return
        keeper = os.fork()
        if keeper == 0:
            try:
                supervise_run(ground, channel, request["kind"], request["wall_s"])
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 - the sandbox's own failure, told to the worker
                text = str(error) if isinstance(error, SetupFailed) else traceback.format_exc()
                send_message(channel, {"failed": text, "is_exhaustion": is_exhaustion(error)})
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
        if ground.is_isolated:
            _kill_leftovers()
        if status < 0:
            text = f"the keeper was killed by {signal.Signals(-status).name}"
            send_message(channel, {"failed": text, "is_exhaustion": True})
        if status != 0:
            return  # what the worker has sent for that run may still be unread: it starts another zygote


def _kill_leftovers() -> None:
    """Kill and reap whatever a keeper that died early has left in this pid namespace."""
    if os.getpid() != 1:
        raise RuntimeError("not the first process of a pid namespace: this would kill the user's other processes")
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
