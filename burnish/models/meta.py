"""Modules with shapes and no memory: for weights that come from elsewhere, and for what follows from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules made here are on the meta device and draw no first numbers.

    To draw them there is a function in Python, whose first call imports the compiler: two seconds for nothing.
    """
    kinds: tuple[Any, ...] = (nn.Linear, nn.Embedding)
    drawing = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = _nothing
    try:
        with torch.device("meta"):
            yield
    finally:
        for kind, function in zip(kinds, drawing, strict=True):
            kind.reset_parameters = function


def _nothing(module: nn.Module) -> None:
    pass
