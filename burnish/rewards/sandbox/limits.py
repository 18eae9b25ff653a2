"""What one program may use, and how its process is confined to that before the first line of it runs."""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import resource
import signal
from dataclasses import dataclass

from burnish.rewards.sandbox import kernel, seccomp

MIB = 1 << 20
OWN_PROCESSES = 6  # the sandbox's own, which are counted with the program's: both are the same user
FURTHER_PROCESSES = 16  # what the kernel lets a program start beyond its limit, until the keeper sees that and ends it


@dataclass(frozen=True)
class Limits:
    """The limits of a program and all its children together; of one process only where it says so."""

    memory_bytes: int = 2048 * MIB
    """Memory of all processes together, and address space of each."""
    processes: int = 32
    """Processes and threads; whoever has more is ended at once, so that a bomb burns no time."""
    scratch_bytes: int = 64 * MIB
    """Size of the scratch directory, and of any one file."""
    output_bytes: int = 4 * MIB
    """What it may write to standard output, and again to standard error."""
    open_files: int = 64
    """Open files of one process."""


def confine(limits: Limits, cpu_s: float, is_isolated: bool) -> None:
    """Take from this process, for good, what a program must not have; what it starts inherits that."""
    # Outside a user namespace the kernel counts all of a user's processes on the machine: there the keeper counts.
    processes = limits.processes + OWN_PROCESSES + FURTHER_PROCESSES if is_isolated else resource.RLIM_INFINITY
    for which, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(cpu_s) + 1),
        (resource.RLIMIT_FSIZE, limits.scratch_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(which)[1]
        lower = (
            value if hard == resource.RLIM_INFINITY else hard if value == resource.RLIM_INFINITY else min(value, hard)
        )
        resource.setrlimit(which, (lower, lower))
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)
    kernel.drop_capabilities()
    seccomp.install()


def arrange_descriptors(kept: dict[int, int], empty: tuple[int, ...]) -> None:
    """Make `kept` (number wanted: descriptor now) and /dev/null under `empty` the only descriptors of this process."""
    lowest = max(*kept, *empty, *kept.values()) + 1
    nowhere = os.open(os.devnull, os.O_RDWR)
    moved = {}
    for number, descriptor in (*kept.items(), *((number, nowhere) for number in empty)):
        moved[number] = fcntl.fcntl(descriptor, fcntl.F_DUPFD, lowest)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number, inheritable=False)
    edges = [-1, *sorted(moved), _most_descriptors()]
    for below, above in itertools.pairwise(edges):
        if below + 1 < above:  # an empty range that starts at 0 is everything to some versions of Python
            os.closerange(below + 1, above)


def _most_descriptors() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if hard == resource.RLIM_INFINITY else max(soft, hard)
