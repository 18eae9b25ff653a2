"""Starting a kernel while the one before it ends: its programs are placed, and wait, before the last of the others has left.

Hopper and later chips can do that (CUDA's programmatic dependent launch). A kernel launched so calls `gdc_wait` before it reads
or writes anything another kernel has to do with; then all that came before is done and seen. The gap between two kernels is
about a microsecond, and a decode step has hundreds of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

ENABLED = False


@cache
def _can(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def early(x: Tensor) -> dict[str, Any]:
    """The options of such a launch where the device of `x` can do it."""
    if ENABLED and x.is_cuda and _can(x.device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
