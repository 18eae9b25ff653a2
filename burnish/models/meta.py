"""Modules with shapes and no memory: for weights that come from elsewhere, and for what follows from shapes alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_alone = threading.RLock()
"""Two threads that put back what they found would leave nothing of it."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules made here are on the meta device and draw no first numbers.

    To draw them there is a function in Python, whose first call imports the compiler: two seconds for nothing.
    """
    kinds: tuple[Any, ...] = (nn.Linear, nn.Embedding)
    with _alone:
        drawing = [kind.reset_parameters for kind in kinds]
        for kind in kinds:
            kind.reset_parameters = _nothing
        try:
            with torch.device("meta"):
                yield
        finally:
            for kind, function in zip(kinds, drawing, strict=True):
                kind.reset_parameters = function


def with_memory(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module's tensors memory on a device, their numbers to come; those of floating point get the type.

    In this order no float32 copy of a model is ever made. torch has `to_empty` for it, which imports the compiler too.
    """
    module.to(dtype)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(_room(parameter, device), parameter.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, _room(buffer, device))


def _room(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _nothing(module: nn.Module) -> None:
    pass
