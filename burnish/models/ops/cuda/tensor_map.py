"""What the copy engine of a Hopper GPU must know of a tensor in bfloat16 and of the boxes it moves."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from burnish.models.ops.cuda.driver import call

_BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_SWIZZLE = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTION = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


@lru_cache(maxsize=4096)
def tensor_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzled: bool
) -> ctypes.Array[ctypes.c_char]:
    """The innermost dimension first, which is dense; `strides` of the others are in bytes. What lies outside is read as 0."""
    memory = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(memory) % 64
    found = (ctypes.c_char * 128).from_buffer(memory, start)  # which keeps the memory
    rank = len(shape)
    call(
        "cuTensorMapEncodeTiled",
        found,
        _BFLOAT16,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _SWIZZLE if swizzled else 0,
        _PROMOTION,
        0,
    )
    return found
