"""Starts a confined process, measures what its process tree uses, and makes sure that all of it is gone afterwards.

With namespaces, the process is the first one of a pid namespace of its own. When it ends, for whatever reason, the kernel kills everything
in that namespace, daemons included. The process holds the descriptors it is given and no others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from burnish.sandbox import namespaces
from burnish.sandbox.limits import Limits, arrange_descriptors, confine

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KIB = 1024
MAX_WALKS = 4  # after this many incomplete walks, all processes that any of them found are counted together
PROCESS_GONE = (FileNotFoundError, ProcessLookupError)
KILL_TIMEOUT_S = 5.0
PROGRAM_OOM_SCORE = "1000"
"""The kernel kills these processes first when memory runs out. The sandbox's own processes have a lower score."""
STATUS_FD = 9
"""The descriptor on which a starting process reports an error. It is closed before the first line of a program runs."""


# --- usage of a process tree -----------------------------------------------------------------------------------------
#
# Limits on a whole tree are enforced from /proc, because an rlimit counts one process at a time.
#
# The tree is complete. The kernel lists the children of each thread. An orphan becomes a child of the first process of its pid namespace,
# or of the supervisor if there is no namespace. A thread or process that ends during a walk hands its children to one that may have been
# read before it, so such a walk is repeated.
#
# The sums are complete because of the seccomp filter (burnish.sandbox.limits). A program cannot have shared memory without a file, which
# would stay allocated while no process maps it. It cannot ignore SIGCHLD either, so the CPU time of each ended child reaches the process
# that waits for it.


class ResourceUse(NamedTuple):
    """What a process and its descendants use."""

    processes: list[int]
    tasks: int  # processes and threads
    memory_bytes: int
    cpu_s: float


class _ProcessUsage(NamedTuple):
    children: list[int]
    has_ended: bool  # no thread is alive; it waits to be reaped
    tasks: int
    memory_bytes: int
    cpu_s: float  # its own and that of the children it has waited for


def tree_usage(root: int, processes: int, shared_bytes: int = 0) -> ResourceUse:
    """What the process tree under and including `root` uses. `processes` is an open /proc, and `root` a pid in it.

    `shared_bytes` are subtracted from the memory of each process: the memory it shares with the process it was forked from.
    """
    counted: dict[int, _ProcessUsage] = {}
    known_ended: set[int] = set()
    for _ in range(MAX_WALKS):
        found, is_complete = _walk(root, processes)
        ended = {number for number, process in found.items() if process.has_ended}
        if is_complete and ended <= known_ended:
            counted = found
            break
        counted |= found
        known_ended |= ended
    return ResourceUse(
        list(counted),
        sum(process.tasks for process in counted.values()),
        sum(max(0, process.memory_bytes - shared_bytes) for process in counted.values()),
        sum(process.cpu_s for process in counted.values()),
    )


def _walk(root: int, processes: int) -> tuple[dict[int, _ProcessUsage], bool]:
    """The processes from `root` down, and whether all of them and all their threads could be read."""
    found: dict[int, _ProcessUsage] = {}
    is_complete = True
    numbers = [root]
    for number in numbers:  # grows during the loop
        try:
            found[number], has_all_threads = _read_process(number, processes)
        except PROCESS_GONE:
            is_complete = False
            continue
        is_complete &= has_all_threads
        numbers += (child for child in found[number].children if child not in found)
    return found, is_complete


def _read_process(number: int, processes: int) -> tuple[_ProcessUsage, bool]:
    """Read one process; also return whether none of its threads ended meanwhile. Raises one of PROCESS_GONE if it is gone."""
    fields = _read_text(f"{number}/stat", processes).rpartition(")")[2].split()
    is_first_thread_alive, num_threads = fields[0] not in "ZX", int(fields[17])
    threads = _thread_ids(number, processes) if num_threads > 1 else [number]
    memory = resident_bytes(number, processes)
    children, has_all_threads = [], True
    for thread in threads:
        try:
            children += _read_text(f"{number}/task/{thread}/children", processes).split()
            if not is_first_thread_alive and thread != number:  # the kernel shows the memory only at a living thread
                memory = max(memory, _memory_bytes(f"{number}/task/{thread}/status", processes))
        except PROCESS_GONE:
            has_all_threads = False
    has_ended = not is_first_thread_alive and num_threads <= 1
    cpu_s = sum(map(int, fields[11:15])) / CLOCK_TICKS_PER_S
    return _ProcessUsage(
        [int(child) for child in children], has_ended, max(1, num_threads), memory, cpu_s
    ), has_all_threads


def resident_bytes(process: int, processes: int) -> int:
    """The memory of one process: resident plus swapped. A program can swap its memory out by itself (MADV_PAGEOUT)."""
    return _memory_bytes(f"{process}/status", processes)


def _memory_bytes(path: str, processes: int) -> int:
    lines = _read_text(path, processes).splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(("VmRSS:", "VmSwap:")))


def own_pid(processes: int) -> int:
    """The pid of this process in this /proc."""
    return int(os.readlink("self", dir_fd=processes))


def namespace_pids(process: int, processes: int) -> list[int]:
    """The pids of a process: in this /proc, then in each pid namespace below it that the process is in."""
    lines = _read_text(f"{process}/status", processes).splitlines()
    return [int(pid) for line in lines if line.startswith("NSpid:") for pid in line.split()[1:]]


def children_of(process: int, processes: int) -> list[int]:
    """The children of all threads of a process, including adopted ones."""
    return _read_process(process, processes)[0].children


def _thread_ids(process: int, processes: int) -> list[int]:
    with _open_fd(f"{process}/task", processes) as folder:
        return [int(name) for name in os.listdir(folder)]


def _read_text(path: str, processes: int) -> str:
    with _open_fd(path, processes) as descriptor:
        parts = []
        while part := os.read(descriptor, 1 << 16):  # the kernel returns some files one page at a time
            parts.append(part)
        return b"".join(parts).decode(errors="replace")  # a process may give itself any name


@contextmanager
def _open_fd(path: str, processes: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=processes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# --- confined processes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SandboxContext:
    """What a zygote has determined and opened once, for all its runs."""

    limits: Limits
    is_isolated: bool
    processes: int  # descriptor of the machine's /proc
    pid_namespace: int  # descriptor of this process's own pid namespace


class SetupFailed(Exception):
    """A confined process could not be set up."""


class CannotKill(Exception):
    """Without a namespace, a program starts processes faster than they can be killed."""


@dataclass
class ConfinedProcess:
    """A confined process, as its supervisor sees it."""

    pid: int
    pidfd: int
    scratch: str | None  # a directory to remove afterwards; None if it goes with the mount namespace
    status: int | None = None  # as from `waitstatus_to_exitcode`, once it has ended

    def reap(self) -> None:
        """Wait for its end and record its status."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """Kill it, and with it everything in its namespace."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def clean_up(self) -> None:
        """Remove its directory. Call it once no process can write there."""
        if self.scratch is not None:
            remove_tree(self.scratch)
            self.scratch = None


def start_confined(
    context: SandboxContext, descriptors: dict[int, int], cpu_s: float, role: Callable[[], None]
) -> ConfinedProcess:
    """Start a confined process that holds only these descriptors (its number: ours) and runs `role`; SetupFailed on an error."""
    scratch = None if context.is_isolated else tempfile.mkdtemp(prefix="burnish-program-")
    status_reader, status_writer = os.pipe()
    if context.is_isolated:
        namespaces.unshare(namespaces.CLONE_NEWPID, "pid, of a program")
    pid = os.fork()
    if pid == 0:
        _run_confined(context, {**descriptors, STATUS_FD: status_writer}, cpu_s, role, scratch)
    os.close(status_writer)
    if context.is_isolated:
        namespaces.enter_pid_namespace(context.pid_namespace)
    child = ConfinedProcess(pid, os.pidfd_open(pid), scratch)
    with os.fdopen(status_reader, "rb") as reader:
        problem = reader.read().decode()
    if problem:
        child.kill()
        child.clean_up()
        raise SetupFailed(problem)
    return child


def _run_confined(
    context: SandboxContext, descriptors: dict[int, int], cpu_s: float, role: Callable[[], None], scratch: str | None
) -> None:
    """In the new process: set up namespaces, descriptors and limits, then run the role. It never returns."""
    status_writer = descriptors[STATUS_FD]
    try:
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the supervisor")
        os.setsid()  # otherwise a signal to its process group would reach the sandbox's own processes, with or without namespaces
        _set_program_oom_score(context)
        if scratch is None:
            namespaces.enter_program_namespaces()
            namespaces.mount_scratch(context.limits.scratch_bytes)
        else:
            os.chdir(scratch)
            os.environ.update(HOME=scratch, TMPDIR=scratch)
            tempfile.tempdir = None
        arrange_descriptors(descriptors, tuple(n for n in (0, 1, 2) if n not in descriptors))
        status_writer = STATUS_FD
        confine(context.limits, cpu_s, context.is_isolated)
        os.close(STATUS_FD)
        role()
    except BaseException:  # noqa: BLE001 - reported to the supervisor, or if STATUS_FD is closed already, the program failed
        with contextlib.suppress(OSError):
            os.write(status_writer, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _set_program_oom_score(context: SandboxContext) -> None:
    """Make the kernel kill this process, not its supervisor, if the machine runs out of memory."""
    if context.is_isolated:  # after a change of privileges a process may not open its own files in /proc
        namespaces.prctl(namespaces.PR_SET_DUMPABLE, 1, step="open own files in /proc")
    descriptor = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=context.processes)
    os.write(descriptor, PROGRAM_OOM_SCORE.encode())
    os.close(descriptor)
    if context.is_isolated:
        namespaces.prctl(namespaces.PR_SET_DUMPABLE, 0, step="close own files in /proc")


def remove_tree(folder: str) -> None:
    """Remove a directory that a program has filled, of any depth, including directories that their owner may not read."""
    with contextlib.suppress(FileNotFoundError):
        os.chmod(folder, 0o700)
    numbers, unfinished = itertools.count(), [folder]
    while unfinished:
        inside = unfinished[-1]
        with os.scandir(inside) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                # Move it up, so that no path gets longer than the kernel allows.
                moved = f"{folder}.{next(numbers)}"
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, moved)
                unfinished.append(moved)
            else:
                os.unlink(entry.path)
        if unfinished[-1] == inside:
            os.rmdir(unfinished.pop())


def kill_descendants(context: SandboxContext) -> None:
    """Without a namespace: kill all descendants of this process, daemons included, until none is left."""
    me, end = own_pid(context.processes), time.monotonic() + KILL_TIMEOUT_S
    while left := children_of(me, context.processes):
        for pid in tree_usage(me, context.processes).processes[1:] or left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > end:
            raise CannotKill(f"processes {left} of a program cannot be killed")
        time.sleep(0.001)
