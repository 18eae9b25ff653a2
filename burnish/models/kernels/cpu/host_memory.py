"""Memory of the C library that a process frees and soon needs again, step after step."""

from __future__ import annotations

import contextlib
import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of glibc's `mallopt`."""
NEVER = -1
MIN_BYTES = 1 << 26
"""Weights of a model whose large temporaries are worth it."""
GROWTH = 1 << 28
"""Bytes that the heap grows by at least."""


def keep_freed_memory() -> None:
    """Let the allocator keep what is freed instead of returning it to the system, if it is glibc's.

    Returned memory must be mapped, and cleared by the kernel, when it is allocated again: an update of a 135M model mapped 600 MB,
    which took a seventh of its time on a virtual machine. The peak is about the same, since every step reaches it.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library, which has no such setting
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, GROWTH)):
            mallopt(parameter, value)
