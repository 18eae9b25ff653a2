"""Device helpers of the kernels: whether Triton runs, deterministic mode, copies to a device, the cache directory of compiled kernels."""

from __future__ import annotations

import importlib.util
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.config.errors import UserError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS repeats its results. The first one is the faster."""

_TORCH_SETTINGS: Any = torch.utils.deterministic


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(x: Tensor) -> bool:
    """Whether Triton kernels run on this tensor; otherwise the torch implementation does."""
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


def use_deterministic_algorithms() -> None:
    """Make all operations on the GPU of this process repeat their results bit for bit. Call it before the first product.

    torch then sums in a fixed order: index_add and scatter_add (shared prefixes, segments), and the backward of flash attention. What
    has no such form raises an error that names the operation. cuDNN's attention is not used (`tree_attention.has_cudnn_kernel`).
    Our own kernels have no atomic sums and no timed choice of tile sizes.
    """
    chosen = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])
    if chosen not in CUBLAS_WORKSPACES:
        raise UserError(
            f"training.deterministic: {CUBLAS_VARIABLE}={chosen} lets cuBLAS choose its sums; unset it, or set it to "
            f"{' or '.join(CUBLAS_WORKSPACES)}"
        )
    torch.use_deterministic_algorithms(True)
    _TORCH_SETTINGS.fill_uninitialized_memory = False  # every buffer is written before it is read


@contextmanager
def deterministic_algorithms(is_wanted: bool) -> Iterator[None]:
    """Deterministic mode for the block, if it is wanted; then as before."""
    before = torch.are_deterministic_algorithms_enabled(), _TORCH_SETTINGS.fill_uninitialized_memory
    if is_wanted:
        use_deterministic_algorithms()
    try:
        yield
    finally:
        if is_wanted:
            torch.use_deterministic_algorithms(before[0])
            _TORCH_SETTINGS.fill_uninitialized_memory = before[1]


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
