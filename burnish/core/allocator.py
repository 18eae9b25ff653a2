"""What the C library does with memory that is freed.

A micro-batch's tensors are freed and asked for again by the next one, hundreds of times a second. glibc gives large blocks, and the end
of its heap, back to the system at once, and every page of them costs a fault when it is asked for again: up to a tenth of an update.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT = (1 << 31) - 1  # the largest int
HEAP_BLOCK = 1 << 30  # larger ones go back to the system as ever


@cache
def keep_freed_memory() -> bool:
    """Have what this process frees wait for its next request instead; whether the C library can. The process's peak stays what it is."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, HEAP_BLOCK) and mallopt(M_TRIM_THRESHOLD, KEPT))
