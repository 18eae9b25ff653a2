"""How much memory a run holds: what torch has allocated on a GPU, the resident size of the process on a CPU."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

GIB = 2**30


def restart_peak(device: torch.device) -> None:
    """The next peak is counted from here. A process cannot do so with its resident size: there it is that of its life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_values(device: torch.device) -> dict[str, float]:
    """`memory/peak_gib` since the peak was restarted, and `memory/current_gib` where the system tells it."""
    if device.type == "cuda":
        peak, current = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return {"memory/peak_gib": peak / GIB, "memory/current_gib": current / GIB}
    unit = 1 if sys.platform == "darwin" else 1024  # of getrusage
    values = {"memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
    pages = Path("/proc/self/statm")
    if pages.is_file():
        values["memory/current_gib"] = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    return values
