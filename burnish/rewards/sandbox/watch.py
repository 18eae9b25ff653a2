"""What a tree of processes uses, read from /proc: the limits that no rlimit knows, because it counts one process at a time."""

from __future__ import annotations

import os
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")


class Use(NamedTuple):
    """Of a process and its descendants."""

    processes: list[int]
    tasks: int  # processes and threads
    memory_bytes: int
    cpu_s: float


def use_of(root: int, processes: int, shared_bytes: int = 0) -> Use:
    """What the tree below and including `root` uses; `processes` is an open /proc, and `root` a number in it.

    Of every process `shared_bytes` are left out: what it has in common with the process it was forked from.
    """
    found, tasks, memory, cpu = [root], 0, 0, 0.0
    for number in found:  # grows as it goes
        try:
            resident = int(_read(f"{number}/statm", processes).split()[1]) * PAGE
            fields = _read(f"{number}/stat", processes).rpartition(")")[2].split()
            children = _read(f"{number}/task/{number}/children", processes).split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        tasks += int(fields[17])
        memory += max(0, resident - shared_bytes)
        cpu += sum(map(int, fields[11:15])) / TICK  # its own time, and that of the children it has waited for
        found += map(int, children)
    return Use(found, tasks, memory, cpu)


def resident_bytes(process: int, processes: int) -> int:
    """The resident memory of one process."""
    return int(_read(f"{process}/statm", processes).split()[1]) * PAGE


def number_of_self(processes: int) -> int:
    """This process's number as this /proc has it."""
    return int(os.readlink("self", dir_fd=processes))


def children_of(process: int, processes: int) -> list[int]:
    """The children that the first thread of a process has started or been given."""
    return [int(child) for child in _read(f"{process}/task/{process}/children", processes).split()]


def _read(path: str, processes: int) -> str:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=processes)
    try:
        return os.read(descriptor, 1 << 16).decode()
    finally:
        os.close(descriptor)
