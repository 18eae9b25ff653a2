"""What a tree of processes uses, read from /proc: the limits that no rlimit knows, because it counts one process at a time.

The tree is complete. The kernel lists the children of each thread, and an orphan becomes a child of the first process of its pid
namespace, or of the keeper where there is no namespace. A thread or process that ends during a walk hands its children to one that
may have been read before it, so such a walk is repeated.

The sums are complete because of the seccomp filter (burnish.rewards.sandbox.seccomp). A program cannot have shared memory that
belongs to no file, which stays allocated while no process has it mapped. It cannot ignore SIGCHLD either, so that the CPU time of
each ended child reaches the process that waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

TICK = os.sysconf("SC_CLK_TCK")
KIB = 1024
MAX_WALKS = 4  # after so many incomplete walks, all processes of them are counted together
GONE = (FileNotFoundError, ProcessLookupError)


class Use(NamedTuple):
    """Of a process and its descendants."""

    processes: list[int]
    tasks: int  # processes and threads
    memory_bytes: int
    cpu_s: float


class _Process(NamedTuple):
    children: list[int]
    has_ended: bool  # no thread of it is alive; it waits to be reaped
    tasks: int
    memory_bytes: int
    cpu_s: float  # its own, and that of the children it has waited for


def use_of(root: int, processes: int, shared_bytes: int = 0) -> Use:
    """What the tree below and including `root` uses; `processes` is an open /proc, and `root` a number in it.

    Of every process `shared_bytes` are left out: what it has in common with the process it was forked from.
    """
    counted: dict[int, _Process] = {}
    known_ended: set[int] = set()
    for _ in range(MAX_WALKS):
        found, is_complete = _walk(root, processes)
        ended = {number for number, process in found.items() if process.has_ended}
        if is_complete and ended <= known_ended:
            counted = found
            break
        counted |= found
        known_ended |= ended
    return Use(
        list(counted),
        sum(process.tasks for process in counted.values()),
        sum(max(0, process.memory_bytes - shared_bytes) for process in counted.values()),
        sum(process.cpu_s for process in counted.values()),
    )


def _walk(root: int, processes: int) -> tuple[dict[int, _Process], bool]:
    """The processes from `root` down, and whether all of them, with all their threads, were still there to be read."""
    found: dict[int, _Process] = {}
    is_complete = True
    numbers = [root]
    for number in numbers:  # grows as it goes
        try:
            found[number], has_all_threads = _read_process(number, processes)
        except GONE:
            is_complete = False
            continue
        is_complete &= has_all_threads
        numbers += (child for child in found[number].children if child not in found)
    return found, is_complete


def _read_process(number: int, processes: int) -> tuple[_Process, bool]:
    """One process, and whether none of its threads ended meanwhile; FileNotFoundError or ProcessLookupError if it is gone."""
    fields = _read(f"{number}/stat", processes).rpartition(")")[2].split()
    is_first_thread_alive, num_threads = fields[0] not in "ZX", int(fields[17])
    threads = _threads(number, processes) if num_threads > 1 else [number]
    memory = resident_bytes(number, processes)
    children, has_all_threads = [], True
    for thread in threads:
        try:
            children += _read(f"{number}/task/{thread}/children", processes).split()
            if not is_first_thread_alive and thread != number:  # the kernel shows the memory at a living thread only
                memory = max(memory, _memory_bytes(f"{number}/task/{thread}/status", processes))
        except GONE:
            has_all_threads = False
    has_ended = not is_first_thread_alive and num_threads <= 1
    cpu_s = sum(map(int, fields[11:15])) / TICK
    return _Process([int(child) for child in children], has_ended, max(1, num_threads), memory, cpu_s), has_all_threads


def resident_bytes(process: int, processes: int) -> int:
    """The memory of one process: what is resident, and what was swapped out, which a program can ask for (MADV_PAGEOUT)."""
    return _memory_bytes(f"{process}/status", processes)


def _memory_bytes(path: str, processes: int) -> int:
    lines = _read(path, processes).splitlines()
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(("VmRSS:", "VmSwap:")))


def number_of_self(processes: int) -> int:
    """This process's number as this /proc has it."""
    return int(os.readlink("self", dir_fd=processes))


def children_of(process: int, processes: int) -> list[int]:
    """The children that any thread of a process has started or been given."""
    return _read_process(process, processes)[0].children


def _threads(process: int, processes: int) -> list[int]:
    with _opened(f"{process}/task", processes) as folder:
        return [int(name) for name in os.listdir(folder)]


def _read(path: str, processes: int) -> str:
    with _opened(path, processes) as descriptor:
        parts = []
        while part := os.read(descriptor, 1 << 16):  # the kernel gives some files a page at a time
            parts.append(part)
        return b"".join(parts).decode(errors="replace")  # a process may give itself any name


@contextmanager
def _opened(path: str, processes: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=processes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
