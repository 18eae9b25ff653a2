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
from collections.abc import Callable
from dataclasses import dataclass

from burnish.rewards.sandbox import kernel, namespaces, view, watch
from burnish.rewards.sandbox.limits import Limits, arrange_descriptors, confine

REAP_S = 5.0
EXPENDABLE = "1000"  # the kernel takes memory from these processes first; the sandbox's own have a lower score
READY = 9  # where a starting process says what went wrong; closed before a program's first line


@dataclass(frozen=True)
class Ground:
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
class Box:
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


def start(ground: Ground, descriptors: dict[int, int], cpu_s: float, role: Callable[[], None]) -> Box:
    """A confined process that has these descriptors (its number: ours) and runs `role`; SetupFailed if it cannot be made."""
    scratch = None if ground.is_isolated else tempfile.mkdtemp(prefix="burnish-program-")
    said, saying = os.pipe()
    if ground.is_isolated:
        kernel.unshare(kernel.CLONE_NEWPID, "pid, of a program")
    pid = os.fork()
    if pid == 0:
        _become(ground, {**descriptors, READY: saying}, cpu_s, role, scratch)
    os.close(saying)
    if ground.is_isolated:
        kernel.enter_pid_namespace(ground.pid_namespace)
    box = Box(pid, os.pidfd_open(pid), scratch)
    with os.fdopen(said, "rb") as reader:
        problem = reader.read().decode()
    if problem:
        box.kill()
        box.clean_up()
        raise SetupFailed(problem)
    return box


def _become(
    ground: Ground, descriptors: dict[int, int], cpu_s: float, role: Callable[[], None], scratch: str | None
) -> None:
    """In the new process: namespaces, descriptors and limits, then the role; it never returns."""
    saying = descriptors[READY]
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL, step="die with the keeper")
        os.setsid()  # a signal to its process group would reach the sandbox's own processes, namespace or not
        _be_expendable(ground)
        if scratch is None:
            namespaces.own()
            view.add_scratch(ground.limits.scratch_bytes)
        else:
            os.chdir(scratch)
            os.environ.update(HOME=scratch, TMPDIR=scratch)
            tempfile.tempdir = None
        arrange_descriptors(descriptors, tuple(n for n in (0, 1, 2) if n not in descriptors))
        saying = READY
        confine(ground.limits, cpu_s, ground.is_isolated)
        os.close(READY)
        role()
    except BaseException:  # noqa: BLE001 - told to the keeper, unless it is too late for that: then the program failed
        with contextlib.suppress(OSError):
            os.write(saying, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _be_expendable(ground: Ground) -> None:
    """Have the kernel end this process, not its keeper, if the machine runs out of memory."""
    if ground.is_isolated:  # where a change of rights has taken this process's own files in /proc from it
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1, step="open the own files in /proc")
    descriptor = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=ground.processes)
    os.write(descriptor, EXPENDABLE.encode())
    os.close(descriptor)
    if ground.is_isolated:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0, step="close the own files in /proc")


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


def kill_descendants(ground: Ground) -> None:
    """Where no namespace does it: kill what this process has left, daemons included, until nothing is left."""
    me, end = watch.number_of_self(ground.processes), time.monotonic() + REAP_S
    while left := watch.children_of(me, ground.processes):
        for pid in watch.use_of(me, ground.processes).processes[1:] or left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > end:
            raise CannotKill(f"processes {left} of a program cannot be killed")
        time.sleep(0.001)
