"""Device helpers of the kernels: whether Triton runs, copies to a device, the cache directory of compiled kernels."""

from __future__ import annotations

import importlib.util
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(x: Tensor) -> bool:
    """Whether Triton kernels run on this tensor; otherwise the torch implementation does."""
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to a device. On a GPU the copy goes through pinned memory, so that it does not block the host."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def kernel_cache_dir() -> Path | None:
    """The cache directory of compiled kernels; None unless it is writable by this user alone.

    A directory that others can write to would let them run code in this process.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burnish"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None
    is_ours = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if is_ours and os.access(path, os.W_OK | os.X_OK) else None


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that is renamed to `path` on success.

    Two processes may write the same file at once; neither ever reads an incomplete one.
    """
    handle, name = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
