"""Linux processes: parents and descendants, their state, signals, and killing orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
"""A process of a run that handles this signal writes its stacks to a file."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_KILL_ROUNDS = 20
"""How often processes are looked for and killed. A program that starts others all the time is stopped after a few."""
KILL_ROUND_S = 0.005
ORPHAN_GRACE_S = 5.0
"""Time for the processes of a dead driver to end by themselves before they are killed."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def adopt_orphans() -> None:
    """Become the parent of processes that a dead child leaves behind, so that they can be found and killed."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_on_parent_exit(parent: int, number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent ends for any reason."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def parent_pids() -> dict[int, int]:
    """Return the parent of every visible process of this machine, without zombies."""
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The process name is in parentheses and may contain any character. State and parent follow the last ")".
            state, parent = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    above = parent_pids()
    found, frontier = list[int](), {pid}
    while frontier:
        frontier = {child for child, parent in above.items() if parent in frontier}
        found += sorted(frontier)
    return found


def processes_with_variable(text: str) -> list[int]:
    """Return the processes of this user that were started with an environment variable, `NAME=VALUE`, wherever they are in the tree."""
    entry, found = text.encode(), list[int]()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
                if entry in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def kill_all_with_variable(text: str) -> None:
    """Kill all processes that were started with an environment variable, and those that they start meanwhile.

    This finds programs that have left the session and the process group of the program that started them, as daemons do.
    """
    for _ in range(MAX_KILL_ROUNDS):
        left = [pid for pid in processes_with_variable(text) if pid != os.getpid()]
        if not left:
            return
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(KILL_ROUND_S)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal such as SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def num_bytes_read(pid: int) -> int:
    """Return the bytes that a process has read from disks; 0 if the system does not tell."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        return int(Path(f"/proc/{pid}/io").read_text().partition("\nread_bytes: ")[2].split()[0])
    return 0


def workers_that_dump_stacks(pid: int) -> Iterator[int]:
    """Yield the Ray workers below a process that handle `STACKS_SIGNAL`."""
    for child in descendants(pid):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if not Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::"):
                continue
            status = Path(f"/proc/{child}/status").read_text(errors="replace")
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            if caught >> (STACKS_SIGNAL - 1) & 1:
                yield child


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process. A process that has ended is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_orphans() -> list[int]:
    """Wait until the processes of a dead driver end, then kill the rest. Returns the pids that were killed."""
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
    """Return how many processes of this cgroup the kernel has killed for memory; 0 if it does not tell."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        for folder in (Path("/sys/fs/cgroup") / own.lstrip("/"), Path("/sys/fs/cgroup")):
            events = folder / "memory.events"
            if events.is_file():
                return int(events.read_text().partition("oom_kill ")[2].split()[0])
    return 0
