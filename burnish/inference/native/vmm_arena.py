"""GPU memory that can be freed and allocated again at the same addresses, by CUDA's virtual memory management.

CUDA graphs hold the addresses of the cache they were captured with. The addresses are therefore reserved once, and only the
physical memory behind them is freed and allocated: a training step can use it in between.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.models.kernels.cuda.cuda_driver import call_driver

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory of a device
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("security", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VmmArena:
    """`size` bytes on a CUDA device, mapped from the start."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(_PINNED, 0, self._location, None)
        grain = ctypes.c_size_t()
        call_driver("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties), _MINIMUM)
        self.size = ctypes.c_size_t(-(-size // grain.value) * grain.value)
        self.address = ctypes.c_uint64()
        call_driver(
            "cuMemAddressReserve",
            ctypes.byref(self.address),
            self.size,
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._handle: ctypes.c_uint64 | None = None
        self.device = device
        self.map()

    @property
    def is_mapped(self) -> bool:
        """Whether there is memory behind the addresses."""
        return self._handle is not None

    def map(self) -> None:
        """Allocate the memory. Its content is undefined."""
        if self._handle is not None:
            return
        handle = ctypes.c_uint64()
        torch.cuda.empty_cache()  # torch may cache the memory that is needed here
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < self.size.value:
            raise UserError(
                f"the engine's cache needs {self.size.value / 2**30:.1f} GiB and the GPU has {free / 2**30:.1f} GiB free: "
                "lower rollout.cache_gib, rollout.max_rows or rollout.max_tokens, or free memory on the GPU"
            )
        call_driver("cuMemCreate", ctypes.byref(handle), self.size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        call_driver("cuMemMap", self.address, self.size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _Access(self._location, _READ_WRITE)
        call_driver("cuMemSetAccess", self.address, self.size, ctypes.byref(access), ctypes.c_size_t(1))
        self._handle = handle

    def unmap(self) -> None:
        """Free the memory. Nothing may use it until it is mapped again."""
        if self._handle is None:
            return
        torch.cuda.synchronize(self.device)
        call_driver("cuMemUnmap", self.address, self.size)
        call_driver("cuMemRelease", self._handle)
        self._handle = None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> Tensor:
        """A tensor on the memory from byte `start`. It keeps the arena alive."""
        whole = torch.as_tensor(_CudaArray(self), device=self.device)
        return whole[start : start + _num_bytes(shape, dtype)].view(dtype).view(shape)

    def __del__(self) -> None:
        if getattr(self, "address", None) is not None and self.address.value:
            self.unmap()
            call_driver("cuMemAddressFree", self.address, self.size)


class _CudaArray:
    """The arena under the `__cuda_array_interface__` that torch reads."""

    def __init__(self, arena: VmmArena) -> None:
        self.arena = arena
        self.__cuda_array_interface__ = {
            "shape": (arena.size.value,),
            "typestr": "|u1",
            "data": (arena.address.value, False),
            "version": 3,
        }


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
