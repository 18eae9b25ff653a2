"""Where an operation runs: by its Triton kernel, or by torch."""

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
    """Whether the Triton kernels run on this tensor."""
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


# --- Small host arrays to a device without waiting for it.


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor there; on a GPU through pinned memory, so that the copy is only queued."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# --- Where compiled kernels are kept for the next time, and how a file gets there.


def kernel_cache_dir() -> Path | None:
    """Where compiled kernels are kept, nobody else's to write; None where there is no such place."""
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burnish"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    is_ours = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if is_ours and os.access(path, os.W_OK | os.X_OK) else None


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A file to write, which gets the name `path` when it is whole: another process may make the same, and neither reads half of it."""
    handle, name = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
