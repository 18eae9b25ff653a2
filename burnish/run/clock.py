"""How long this process has been alive, from the moment it was started: imports and start-up are a user's time too."""

from __future__ import annotations

import os
import time
from pathlib import Path

IMPORTED = time.monotonic()
STAT = Path("/proc/self/stat")


def process_seconds() -> float:
    """Seconds since this process was started; where the system does not say (no /proc), since this module was imported."""
    if not STAT.exists():
        return time.monotonic() - IMPORTED
    after_name = STAT.read_text().rpartition(")")[2].split()  # a process may have spaces and brackets in its name
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field: clock ticks after the machine started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
