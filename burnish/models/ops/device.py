"""Where an operation runs: by its Triton kernel, or by torch."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels run on this tensor."""
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()
