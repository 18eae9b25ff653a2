"""Decode attention for Hopper GPUs in CUDA C++ (`decode_attention.cu`).

It loads pages by TMA, with one warp for each row and key head. It computes the same as `kernels/triton/decode_attention.py`,
which supports every GPU, dtype and head size, with fewer instructions per key, and runs at memory bandwidth.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.models.kernels.cuda.cuda_driver import Kernel, nvrtc_library, tensor_map
from burnish.models.kernels.fp8 import FP8, Fp8Rows
from burnish.models.kernels.paged_cache import HeadNorms, Pages, Placement, decode_buffers

PAGE = 16
DIMS: tuple[int, ...] = (64, 128)
FP8_DIMS: tuple[int, ...] = (128,)
"""Head sizes of an 8-bit cache that the kernel supports: lines of 128 bytes."""
BLOCK = 32
"""A split has a multiple of this many keys; the CUDA kernel and `combine_splits` assume the same."""
MAX_QUERIES = 8
"""Query heads per key head: the width of a tensor-core tile."""
RING_BYTES = 32 * 1024
"""Bytes in flight to a warp: two steps of 32 keys with heads of 128."""


def has_decode_attention(
    qkv: Tensor, cos: Tensor, placement: Placement, norms: HeadNorms | None, keys: object, values: object
) -> bool:
    """Whether the decode attention kernel supports these tensors."""
    stored, dims = torch.bfloat16, DIMS
    if isinstance(keys, Fp8Rows) and isinstance(values, Fp8Rows):
        keys, values, stored, dims = keys.data, values.data, FP8, FP8_DIMS
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.is_cuda and qkv.shape[0] > 0):
        return False
    _, kv_heads, page, dim = keys.shape
    weights = () if norms is None else (norms.query, norms.key)
    return (
        page == PAGE
        and dim in dims
        and qkv.shape[1] // dim // kv_heads - 2 <= MAX_QUERIES
        and values.shape == keys.shape
        and all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in (qkv, cos, *weights))
        and all(x.dtype == stored and x.is_contiguous() for x in (keys, values))
        and keys.data_ptr() % 16 == values.data_ptr() % 16 == 0
        and placement.position.dtype == torch.int64
        and placement.position.is_contiguous()
        and placement.turn.dtype == torch.int64
        and placement.turn.is_contiguous()
        and placement.table.dtype == torch.int32
        and placement.table.stride(1) == 1
        and torch.cuda.get_device_capability(qkv.device) == (9, 0)
        and nvrtc_library() is not None
    )


def decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    placement: Placement,
    norms: HeadNorms | None,
    keys: Pages,
    values: Pages,
    window: int | None,
    splits: int,
    least: int,
    stores: bool = True,
) -> Tensor:
    """`burnish.models.kernels.inference_ops.decode_attention`, if `has_decode_attention`; [rows, heads * D].

    Without `stores` the new keys and values are in the cache already.
    """
    pages, kv_heads, page, dim = keys.shape
    rows, columns = qkv.shape
    queries = columns // dim // kv_heads - 2
    out, sums, joints = decode_buffers(qkv, kv_heads, dim, splits)
    reach = window if window is not None else 1 << 30
    q_norm, k_norm, eps, shift, factor = norms or HeadNorms(qkv, qkv, 0.0)
    with torch.cuda.device(qkv.device):
        is_quantised = isinstance(keys, Fp8Rows)
        stored = [x.data if isinstance(x, Fp8Rows) else x for x in (keys, values)]
        scales = [x.scale if isinstance(x, Fp8Rows) else x for x in (keys, values)]  # not read in bfloat16
        maps = [_page_map(x.data_ptr(), pages * kv_heads * page, dim, page, is_quantised) for x in stored]
        places = placement.table, placement.position, placement.turn
        tensors = (qkv, q_norm, k_norm, cos, sin, *stored, *scales, *places, out, sums, joints)
        numbers = (dim**-0.5 * 1.4426950408889634, eps, shift, factor)
        sizes = (
            placement.table.stride(0),
            placement.table.shape[1],
            reach,
            splits,
            least,
            kv_heads,
            pages * kv_heads * page,
        )
        arguments = [
            *maps,
            *(ctypes.c_void_p(x.data_ptr()) for x in tensors),
            *map(ctypes.c_float, numbers),
            *map(ctypes.c_int, sizes),
        ]
        kind = dim, queries, norms is not None, placement.rotation is not None, is_quantised, stores
        kernel = _attention_kernel(*kind, qkv.device)
        kernel.launch((rows * kv_heads, splits), 32, arguments)
        if splits > 1:
            from burnish.models.kernels.triton.decode_attention import combine_splits

            combine_splits(sums, joints, placement.position, out, reach, splits, least, kv_heads, dim, BLOCK)
    return out


def _page_map(address: int, lines: int, dim: int, page: int, is_quantised: bool) -> Any:
    """TMA descriptor of the pages of keys or values. A line of 128 bytes is a head in 8 bits, or half of a head of 128 in bfloat16."""
    if is_quantised:
        return tensor_map(address, (dim, lines), (dim,), (dim, page), True, FP8)
    # The outermost dimension, the half of a head, has a smaller stride than the rows; TMA allows that.
    return tensor_map(address, (64, lines, dim // 64), (dim * 2, 128), (64, page, dim // 64), True)


_compile_lock = threading.Lock()


def _attention_kernel(*kind: Any) -> Kernel:
    with _compile_lock:  # threads may request the same kernel at once
        return _compile_attention_kernel(*kind)


@cache
def _compile_attention_kernel(
    dim: int,
    queries: int,
    is_normed: bool,
    is_rotated: bool,
    is_quantised: bool,
    stores: bool,
    device: torch.device,
) -> Kernel:
    stages = RING_BYTES // (4 * PAGE * dim * (1 if is_quantised else 2))
    scales = stages * 4 * PAGE * 4 if is_quantised else 0
    source = attention_source(dim, queries, is_normed, stages, is_rotated, is_quantised, stores)
    return Kernel(source, "decode_attention", RING_BYTES + scales + 1024)


def attention_source(
    dim: int,
    queries: int,
    is_normed: bool,
    stages: int,
    is_rotated: bool = False,
    is_quantised: bool = False,
    stores: bool = True,
) -> str:
    """Source of the decode attention kernel for one head shape; `is_rotated` if rows turn by other than their positions."""
    settings = {"DIM": dim, "QUERIES": queries, "NORMED": int(is_normed), "STAGES": stages, "ROTATED": int(is_rotated)}
    settings |= {"EIGHT": int(is_quantised), "STORES": int(stores)}
    defines = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    return defines + (Path(__file__).parent / "decode_attention.cu").read_text()
