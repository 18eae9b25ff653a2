"""Where Triton kernels can be tested: on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1 with triton installed)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
kernel = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and (CUDA or os.environ.get("TRITON_INTERPRET") == "1")),
    reason="Triton kernels need CUDA, or triton and TRITON_INTERPRET=1",
)
