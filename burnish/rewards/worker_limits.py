"""Limits that a worker process sets on itself before it scores an answer (all on Linux; fewer on other systems).

They bound accidents and greedy answers: CPU time, memory, files, network, orphans. They are not a sandbox: code that an answer smuggles
into `eval` can still read and write files as the user who started the run.
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
    """Have the kernel kill this process group when the other end of the pipe closes, however its owner died.

    Unlike PR_SET_PDEATHSIG, this also reaches the children of a scorer and does not fire when only a thread of the parent ends. It works
    even while this process is stuck in an endless multiplication.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return  # not Linux: an idle worker still ends when its socket closes
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit("the parent was gone before this process was ready")


def limit_resources(memory_gib: float, max_open_files: int = MAX_OPEN_FILES) -> None:
    """Cap address space and open files, and write no core dumps."""
    size = int(memory_gib * 2**30)
    _lower_limit(resource.RLIMIT_AS, size)
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_NOFILE, max_open_files)


def _lower_limit(limit: int, value: int) -> None:
    """Set the soft and the hard limit; keep a stricter hard limit."""
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def extend_cpu_limit(seconds: float) -> None:
    """Let this process use this much more CPU time, then get SIGXCPU.

    The pool's deadline ends this process earlier. The limit is for children that have left the process group: they inherit it.
    """
    soft = math.ceil(time.process_time() + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def leave_network() -> bool:
    """Move into an empty network namespace; False if the system does not allow it.

    Root may do so directly, other users through a user namespace of their own. The kernel allows it only to a process with one thread, so
    this must come before anything that starts threads is imported.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNET) == 0:
        return True
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    # A process without an id map may not create another user namespace, and the sandbox for programs needs one.
    with contextlib.suppress(
        OSError
    ):  # the network is gone either way; the sandbox reports the problem if it is needed
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    return True


def silence_output() -> None:
    """Discard everything that is printed from here on."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.close(devnull)


def run_limited(lifeline: int, memory_gib: float, file_gib: float, command: list[str]) -> None:
    """Become a command whose process group dies with the owner of the lifeline, with limits on memory and on the size of files."""
    die_with_parent(lifeline)
    os.set_inheritable(lifeline, True)  # the kernel watches it only while a process of the group has it open
    limit_resources(memory_gib)
    _lower_limit(resource.RLIMIT_FSIZE, int(file_gib * 2**30))
    os.execvp(command[0], command)


if __name__ == "__main__":  # python -I -S worker_limits.py LIFELINE MEMORY_GIB FILE_GIB COMMAND...
    run_limited(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
