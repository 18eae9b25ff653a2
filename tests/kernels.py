"""Markers and helpers for kernel tests.

Triton kernels run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1 with triton installed).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
kernel = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and (CUDA or os.environ.get("TRITON_INTERPRET") == "1")),
    reason="Triton kernels need CUDA, or triton and TRITON_INTERPRET=1",
)
on_hopper = pytest.mark.skipif(
    not (CUDA and torch.cuda.get_device_capability() == (9, 0)), reason="the kernel is for NVIDIA Hopper"
)


def error(found: Tensor, truth: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((found.double() - truth).norm() / truth.norm())


@contextmanager
def without_c() -> Iterator[None]:
    """Disable the C kernels, so that the torch implementations run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CPU_KERNELS", "0")
        patch.setattr("burnish.models.kernels.cpu.c_library._library", lambda is_double: None)
        yield
