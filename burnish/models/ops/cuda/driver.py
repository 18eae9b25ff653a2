"""Calls of the CUDA driver that torch has no function for."""

from __future__ import annotations

import ctypes
import threading
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


_entered = threading.local()


def enter(device: int) -> None:
    """Let this thread call the driver for a device, with the context that torch uses: a new thread has none before torch has worked in it."""
    if device in getattr(_entered, "devices", ()):
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    call("cuCtxSetCurrent", context)
    _entered.devices = {*getattr(_entered, "devices", ()), device}
