"""Small host arrays to a device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor there; on a GPU through pinned memory, so that the copy is only queued."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
