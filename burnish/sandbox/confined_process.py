"""One confined process: how it is started, and how it is made certain that it and all it started are gone.

In namespaces it is the first process of a pid namespace of its own: when it ends, for whatever reason, the kernel kills everything in
that namespace, daemons included. It holds the descriptors it is given and no others.
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

# --- What a tree of processes uses, read from /proc: the limits that no rlimit knows, because it counts one process at a time.
#
# The tree is complete. The kernel lists the children of each thread, and an orphan becomes a child of the first process of its pid
# namespace, or of the keeper where there is no namespace. A thread or process that ends during a walk hands its children to one that
# may have been read before it, so such a walk is repeated.
#
# The sums are complete because of the seccomp filter (burnish.sandbox.limits). A program cannot have shared memory that
# belongs to no file, which stays allocated while no process has it mapped. It cannot ignore SIGCHLD either, so that the CPU time of
# each ended child reaches the process that waits for it.

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KIB = 1024
MAX_WALKS = 4  # after so many incomplete walks, all processes of them are counted together
PROCESS_GONE = (FileNotFoundError, ProcessLookupError)


class ResourceUse(NamedTuple):
    """Of a process and its descendants."""

    processes: list[int]
    tasks: int  # processes and threads
    memory_bytes: int
    cpu_s: float


class _ProcessUsage(NamedTuple):
    children: list[int]
    has_ended: bool  # no thread of it is alive; it waits to be reaped
    tasks: int
    memory_bytes: int
    cpu_s: float  # its own, and that of the children it has waited for


def tree_usage(root: int, processes: int, shared_bytes: int = 0) -> ResourceUse:
    """What the tree below and including `root` uses; `processes` is an open /proc, and `root` a number in it.

    Of every process `shared_bytes` are left out: what it has in common with the process it was forked from.
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
    """The processes from `root` down, and whether all of them, with all their threads, were still there to be read."""
    found: dict[int, _ProcessUsage] = {}
    is_complete = True
    numbers = [root]
    for number in numbers:  # grows as it goes
        try:
            found[number], has_all_threads = _read_process(number, processes)
        except PROCESS_GONE:
            is_complete = False
            continue
        is_complete &= has_all_threads
        numbers += (child for child in found[number].children if child not in found)
    return found, is_complete


def _read_process(number: int, processes: int) -> tuple[_ProcessUsage, bool]:
    """One process, and whether none of its threads ended meanwhile; FileNotFoundError or ProcessLookupError if it is gone."""
    fields = _read_text(f"{number}/stat", processes).rpartition(")")[2].split()
    is_first_thread_alive, num_threads = fields[0] not in "ZX", int(fields[17])
    threads = _thread_ids(number, processes) if num_threads > 1 else [number]
    memory = resident_bytes(number, processes)
    children, has_all_threads = [], True
    for thread in threads:
        try:
            children += _read_text(f"{number}/task/{thread}/children", processes).split()
            if not is_first_thread_alive and thread != number:  # the kernel shows the memory at a living thread only
                memory = max(memory, _memory_bytes(f"{number}/task/{thread}/status", processes))
        except PROCESS_GONE:
            has_all_threads = False
    has_ended = not is_first_thread_alive and num_threads <= 1
    cpu_s = sum(map(int, fields[11:15])) / CLOCK_TICKS_PER_S
    return _ProcessUsage(
        [int(child) for child in children], has_ended, max(1, num_threads), memory, cpu_s
    ), has_all_threads


def resident_bytes(process: int, processes: int) -> int:
    """The memory of one process: what is resident, and what was swapped out, which a program can ask for (MADV_PAGEOUT)."""
    return _memory_bytes(f"{process}/status", processes)


def _memory_bytes(path: str, processes: int) -> int:
    lines = _read_text(path, processes).splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(("VmRSS:", "VmSwap:")))


def own_pid(processes: int) -> int:
    """This process's number as this /proc has it."""
    return int(os.readlink("self", dir_fd=processes))


def children_of(process: int, processes: int) -> list[int]:
    """The children that any thread of a process has started or been given."""
    return _read_process(process, processes)[0].children


def _thread_ids(process: int, processes: int) -> list[int]:
    with _open_fd(f"{process}/task", processes) as folder:
        return [int(name) for name in os.listdir(folder)]


def _read_text(path: str, processes: int) -> str:
    with _open_fd(path, processes) as descriptor:
        parts = []
        while part := os.read(descriptor, 1 << 16):  # the kernel gives some files a page at a time
            parts.append(part)
        return b"".join(parts).decode(errors="replace")  # a process may give itself any name


@contextmanager
def _open_fd(path: str, processes: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=processes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


KILL_TIMEOUT_S = 5.0
PROGRAM_OOM_SCORE = "1000"  # the kernel takes memory from these processes first; the sandbox's own have a lower score
STATUS_FD = 9  # where a starting process says what went wrong; closed before a program's first line


@dataclass(frozen=True)
class SandboxContext:
    """Where boxes stand: what a zygote has found out and opened once."""

    limits: Limits
    is_isolated: bool
    processes: int  # /proc of the machine, open
    pid_namespace: int  # this process's own, open


class SetupFailed(Exception):
    """A confined process could not be made."""


class CannotKill(Exception):
    """Processes of a program, outside a namespace, are started faster than they are killed."""


@dataclass
class ConfinedProcess:
    """A confined process as its keeper sees it."""

    pid: int
    pidfd: int
    scratch: str | None  # a directory to remove afterwards, where no mount namespace does
    status: int | None = None  # as `waitstatus_to_exitcode` has it, once it has ended

    def reap(self) -> None:
        """Take note that it has ended."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End it, with everything in its namespace."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def clean_up(self) -> None:
        """Remove its directory, once nothing can write there."""
        if self.scratch is not None:
            remove_tree(self.scratch)
            self.scratch = None


def start_confined(
    ground: SandboxContext, descriptors: dict[int, int], cpu_s: float, role: Callable[[], None]
) -> ConfinedProcess:
    """A confined process that has these descriptors (its number: ours) and runs `role`; SetupFailed if it cannot be made."""
    scratch = None if ground.is_isolated else tempfile.mkdtemp(prefix="burnish-program-")
    said, saying = os.pipe()
    if ground.is_isolated:
        namespaces.unshare(namespaces.CLONE_NEWPID, "pid, of a program")
    pid = os.fork()
    if pid == 0:
        _run_confined(ground, {**descriptors, STATUS_FD: saying}, cpu_s, role, scratch)
    os.close(saying)
    if ground.is_isolated:
        namespaces.enter_pid_namespace(ground.pid_namespace)
    box = ConfinedProcess(pid, os.pidfd_open(pid), scratch)
    with os.fdopen(said, "rb") as reader:
        problem = reader.read().decode()
    if problem:
        box.kill()
        box.clean_up()
        raise SetupFailed(problem)
    return box


def _run_confined(
    ground: SandboxContext, descriptors: dict[int, int], cpu_s: float, role: Callable[[], None], scratch: str | None
) -> None:
    """In the new process: namespaces, descriptors and limits, then the role; it never returns."""
    saying = descriptors[STATUS_FD]
    try:
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the keeper")
        os.setsid()  # a signal to its process group would reach the sandbox's own processes, namespace or not
        _set_program_oom_score(ground)
        if scratch is None:
            namespaces.enter_program_namespaces()
            namespaces.mount_scratch(ground.limits.scratch_bytes)
        else:
            os.chdir(scratch)
            os.environ.update(HOME=scratch, TMPDIR=scratch)
            tempfile.tempdir = None
        arrange_descriptors(descriptors, tuple(n for n in (0, 1, 2) if n not in descriptors))
        saying = STATUS_FD
        confine(ground.limits, cpu_s, ground.is_isolated)
        os.close(STATUS_FD)
        role()
    except BaseException:  # noqa: BLE001 - told to the keeper, unless it is too late for that: then the program failed
        with contextlib.suppress(OSError):
            os.write(saying, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _set_program_oom_score(ground: SandboxContext) -> None:
    """Have the kernel end this process, not its keeper, if the machine runs out of memory."""
    if ground.is_isolated:  # where a change of rights has taken this process's own files in /proc from it
        namespaces.prctl(namespaces.PR_SET_DUMPABLE, 1, step="open the own files in /proc")
    descriptor = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=ground.processes)
    os.write(descriptor, PROGRAM_OOM_SCORE.encode())
    os.close(descriptor)
    if ground.is_isolated:
        namespaces.prctl(namespaces.PR_SET_DUMPABLE, 0, step="close the own files in /proc")


def remove_tree(folder: str) -> None:
    """Remove a directory that a program has filled: any depth, and directories that even their owner may not read."""
    with contextlib.suppress(FileNotFoundError):
        os.chmod(folder, 0o700)
    numbers, unfinished = itertools.count(), [folder]
    while unfinished:
        inside = unfinished[-1]
        with os.scandir(inside) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                # Moved up, so that no path gets longer than the kernel takes.
                moved = f"{folder}.{next(numbers)}"
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, moved)
                unfinished.append(moved)
            else:
                os.unlink(entry.path)
        if unfinished[-1] == inside:
            os.rmdir(unfinished.pop())


def kill_descendants(ground: SandboxContext) -> None:
    """Where no namespace does it: kill what this process has left, daemons included, until nothing is left."""
    me, end = own_pid(ground.processes), time.monotonic() + KILL_TIMEOUT_S
    while left := children_of(me, ground.processes):
        for pid in tree_usage(me, ground.processes).processes[1:] or left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > end:
            raise CannotKill(f"processes {left} of a program cannot be killed")
        time.sleep(0.001)
