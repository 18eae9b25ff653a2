"""Finds processes that a sandbox has left: their command line names its limits and is inherited by all forks."""

from __future__ import annotations

import time
from pathlib import Path


def processes(memory_gib: float) -> list[int]:
    """The processes of sandboxes with this limit."""
    found, mark = [], f'"memory_bytes": {int(memory_gib * 2**30)},'.encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found


def settles(memory_gib: float, expected: int, within_s: float = 60.0) -> int:
    """Wait until there are as many processes as expected, at most `within_s`; return how many there are."""
    end = time.monotonic() + within_s
    while len(processes(memory_gib)) != expected and time.monotonic() < end:
        time.sleep(0.02)
    return len(processes(memory_gib))
