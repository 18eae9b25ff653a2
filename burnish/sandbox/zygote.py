"""The process that every program of a worker is forked from: Python started, the standard library loaded, already in the sandbox.

    python -c '... zygote.main()' SOCKET isolated|unsafe LIMITS

It is started with an empty environment, so there is nothing to find in its memory; it is the first process of a pid namespace,
so nothing outlives it; and it never reads what a program is: a keeper, forked for one run, does. A request is three messages: the kind
and the time; what the program's process is told; what the judge's is told, or standard input. The answer is two: that the program
has started, then how it ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from burnish.sandbox import confined_process, namespaces
from burnish.sandbox.confined_process import Ground, SetupFailed
from burnish.sandbox.limits import Limits
from burnish.sandbox.namespaces import STANDARD_LIBRARY
from burnish.sandbox.rpc import receive, send
from burnish.sandbox.run_monitor import is_exhaustion, keep

COMMON = """
abc array base64 bisect bz2 calendar cmath collections concurrent.futures contextlib copy ctypes dataclasses datetime decimal difflib
enum fractions functools gzip hashlib heapq inspect io itertools json lzma math numbers operator pickle pprint queue random re secrets
select shutil signal socket sqlite3 statistics string struct tempfile textwrap threading traceback types typing unicodedata uuid warnings
weakref xml.etree.ElementTree zlib
"""
OWN_OOM_SCORE = 900
UNWANTED = ("_test", "xx", "_xx", "_tkinter", "readline", "_ctypes_test", "_curses", "_gdbm", "_dbm", "nis")


def preload() -> None:
    """Load what programs import, and every extension module: the libraries these need are not in the view."""
    names = COMMON.split()
    for folder in sys.path:
        if os.path.basename(folder) == "lib-dynload" and os.path.isdir(folder):
            names += [f.split(".")[0] for f in os.listdir(folder) if f.endswith(".so")]
    for name in names:
        if not name.startswith(UNWANTED):
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
        _be_expendable()
        preload()
        processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if is_isolated:
            namespaces.enter()
            _step_into_pid_namespace(channel)
        ground = Ground(
            limits=Limits(**json.loads(sys.argv[3])),
            is_isolated=is_isolated,
            processes=processes,
            pid_namespace=os.open("self/ns/pid", os.O_RDONLY, dir_fd=processes),
        )
        confined_process.children_of(
            confined_process.number_of_self(processes), processes
        )  # without this, totals would go unwatched
    except OSError as error:
        send(channel, {"failed": str(error)})
        return
    sys.path[:] = [folder for folder in sys.path if folder.startswith(STANDARD_LIBRARY)]
    gc.collect()
    gc.freeze()  # what is loaded stays shared with every fork
    send(channel, {"ready": True})
    serve(channel, ground)


def _be_expendable() -> None:
    """If the machine runs out of memory, have the kernel end a program first (box.EXPENDABLE), then a sandbox, last the trainer."""
    score = Path("/proc/self/oom_score_adj")
    score.write_text(str(max(OWN_OOM_SCORE, int(score.read_text()))))  # lowering it needs a privilege


def _step_into_pid_namespace(channel: socket.socket) -> None:
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


def serve(channel: socket.socket, ground: Ground) -> None:
    """One run after the other, until the worker hangs up."""
    while True:
        try:
            request: dict[str, Any] = receive(channel)
        except EOFError:
            return
        keeper = os.fork()
        if keeper == 0:
            try:
                keep(ground, channel, request["kind"], request["wall_s"])
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 - the sandbox's own failure, told to the worker
                text = str(error) if isinstance(error, SetupFailed) else traceback.format_exc()
                send(channel, {"failed": text, "is_exhaustion": is_exhaustion(error)})
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
        if ground.is_isolated:
            _leave_nothing()
        if status < 0:
            text = f"the keeper was killed by {signal.Signals(-status).name}"
            send(channel, {"failed": text, "is_exhaustion": True})
        if status != 0:
            return  # what the worker has sent for that run may still be unread: it starts another zygote


def _leave_nothing() -> None:
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
