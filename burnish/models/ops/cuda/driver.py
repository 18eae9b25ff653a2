"""Calls of the CUDA driver that torch has no function for."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; raise with its own words when it fails."""
    code = getattr(_library(), name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {text.value.decode() if text.value else code}")
