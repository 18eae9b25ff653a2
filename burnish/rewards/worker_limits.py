"""What a worker process takes away from itself before it looks at an answer (Linux; elsewhere what there is).

These bound accidents and greedy answers: time, memory, files, network, orphans. They are no jail: code that an
answer smuggles into `eval` still reads and writes files as the user who started the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MAX_OPEN_FILES = 256


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group when the other end of a pipe closes, however its owner died.

    Unlike PR_SET_PDEATHSIG this reaches the children of a scorer too, and does not fire when a mere thread of the
    parent ends. It needs nothing of this process, which may be deep in one endless multiplication.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return  # not Linux: an idle worker still ends when its socket closes
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit("the parent was gone before this process was ready")


def limit_resources(memory_gib: float) -> None:
    """Cap address space and open files, and write no core dumps."""
    size = int(memory_gib * 2**30)
    _lower_limit(resource.RLIMIT_AS, size)
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)


def _lower_limit(limit: int, value: int) -> None:
    """Set a limit for good, keeping a stricter one that is there already."""
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def extend_cpu_limit(seconds: float) -> None:
    """Let this process use this much more CPU time, then get SIGXCPU.

    The pool's deadline comes first for this process; children that fled from its group inherit the limit.
    """
    soft = math.ceil(time.process_time() + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def leave_network() -> bool:
    """Move into a network namespace with nothing in it; False if the system does not allow that.

    Root may do so directly; others through a user namespace of their own. Only a process with one thread may, so this
    comes before anything that starts threads is imported.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNET) == 0:
        return True
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    # Who has no name in its user namespace may not make another, and the sandbox of programs is one.
    with contextlib.suppress(OSError):  # then the sandbox says so when it is asked for; the network is gone either way
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    return True


def silence_output() -> None:
    """Send what is printed from here on to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
