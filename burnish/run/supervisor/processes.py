"""What the supervisor knows of processes: whose they are, what they are doing, and how to be rid of them (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""Whoever of a run's processes catches this signal writes its stacks to a file."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHAN_GRACE_S = 5.0
"""How long the processes of a dead driver may take to end by themselves."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def adopt_orphans() -> None:
    """Become the parent of whatever a dead child leaves behind, so that it can be found and ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_on_parent_exit(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def parent_pids() -> dict[int, int]:
    """The parent of every process of this machine that can be seen; those that have ended and wait for their parent are left out."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name in parentheses may have anything in it; state and parent follow the last one.
            state, parent = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    above = parent_pids()
    found, frontier = list[int](), {pid}
    while frontier:
        frontier = {child for child, parent in above.items() if parent in frontier}
        found += sorted(frontier)
    return found


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP), rather than being slow."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def num_bytes_read(pid: int) -> int:
    """What a process has read from disks so far; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        return int(Path(f"/proc/{pid}/io").read_text().partition("\nread_bytes: ")[2].split()[0])
    return 0


def workers_that_dump_stacks(pid: int) -> Iterator[int]:
    """Workers under a process that write their stacks when they are told to."""
    for child in descendants(pid):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if not Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::"):
                continue
            status = Path(f"/proc/{child}/status").read_text(errors="replace")
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            if caught >> (STACKS_SIGNAL - 1) & 1:
                yield child


def send_signal(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_orphans() -> list[int]:
    """End what a dead driver left: most ends by itself, what does not is killed. Returns which had to be."""
    until = time.monotonic() + ORPHAN_GRACE_S
    while descendants(os.getpid()) and time.monotonic() < until:
        time.sleep(0.05)
        _reap_children()
    killed: set[int] = set()
    until = time.monotonic() + ORPHAN_GRACE_S
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(0.05)
        _reap_children()
    return sorted(killed)


def _reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def out_of_memory_kills() -> int:
    """How many processes of this container or session the kernel has killed for memory so far; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        for folder in (Path("/sys/fs/cgroup") / own.lstrip("/"), Path("/sys/fs/cgroup")):
            events = folder / "memory.events"
            if events.is_file():
                return int(events.read_text().partition("oom_kill ")[2].split()[0])
    return 0
