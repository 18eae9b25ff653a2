"""Where Triton kernels can be tested: on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1 with triton installed);
and a way to do without the C kernels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
kernel = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and (CUDA or os.environ.get("TRITON_INTERPRET") == "1")),
    reason="Triton kernels need CUDA, or triton and TRITON_INTERPRET=1",
)


@contextmanager
def without_c() -> Iterator[None]:
    """No C kernels: their twins in torch run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CPU_KERNELS", "0")
        patch.setattr("burnish.models.ops.cpu.build._library", lambda is_wide: None)
        yield
