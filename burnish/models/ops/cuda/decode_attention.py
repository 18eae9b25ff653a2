"""Attention of a decode step on Hopper: pages come by the copy engine, a warp for each row and key head.

The same as `kernels/decode_step.py`, which is for every GPU, type and head, with fewer instructions a key: what a row holds
is read as fast as memory gives it.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.models.ops.cuda.build import Kernel, compiler
from burnish.models.ops.cuda.tensor_map import tensor_map
from burnish.models.ops.paged import Norms, Placement, results_of

PAGE = 16
DIMS = (64, 128)
BLOCK = 32
"""Keys a stretch is a multiple of, here, in the kernel and for who joins the stretches."""
MOST_QUERIES = 8
"""Query heads to a key head: the width of a tile of the tensor cores."""
RING_BYTES = 32 * 1024
"""On its way to a warp at once: two steps of 32 keys with heads of 128."""


def has_decode_attention(
    qkv: Tensor, cos: Tensor, place: Placement, norms: Norms | None, keys: object, values: object
) -> bool:
    """Whether the kernel can attend to these pages."""
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.is_cuda and qkv.shape[0] > 0):
        return False
    _, kv_heads, page, dim = keys.shape
    weights = () if norms is None else (norms.query, norms.key)
    return (
        page == PAGE
        and dim in DIMS
        and qkv.shape[1] // dim // kv_heads - 2 <= MOST_QUERIES
        and values.shape == keys.shape
        and all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in (qkv, cos, keys, values, *weights))
        and keys.data_ptr() % 16 == values.data_ptr() % 16 == 0
        and place.position.dtype == torch.int64
        and place.position.is_contiguous()
        and place.table.dtype == torch.int32
        and place.table.stride(1) == 1
        and torch.cuda.get_device_capability(qkv.device) == (9, 0)
        and compiler() is not None
    )


def decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: Placement,
    norms: Norms | None,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    splits: int,
    least: int,
) -> Tensor:
    """[rows, heads * D]: `burnish.models.ops.paged.decode_attention` where `has_decode_attention`."""
    pages, kv_heads, page, dim = keys.shape
    rows, columns = qkv.shape
    queries = columns // dim // kv_heads - 2
    out, sums, joints = results_of(qkv, kv_heads, dim, splits)
    reach = window if window is not None else 1 << 30
    q_norm, k_norm, eps, shift, factor = norms or Norms(qkv, qkv, 0.0)
    with torch.cuda.device(qkv.device):
        maps = [  # halves of a line lie nearer than lines do: the copy engine does not mind
            tensor_map(
                x.data_ptr(), (64, pages * kv_heads * page, dim // 64), (dim * 2, 128), (64, page, dim // 64), True
            )
            for x in (keys, values)
        ]
        tensors = (qkv, q_norm, k_norm, cos, sin, keys, values, place.table, place.position, out, sums, joints)
        numbers = (dim**-0.5 * 1.4426950408889634, eps, shift, factor)
        sizes = (place.table.stride(0), place.table.shape[1], reach, splits, least, kv_heads, pages * kv_heads * page)
        arguments = [
            *maps,
            *(ctypes.c_void_p(x.data_ptr()) for x in tensors),
            *map(ctypes.c_float, numbers),
            *map(ctypes.c_int, sizes),
        ]
        kernel = _kernel(dim, queries, norms is not None, qkv.device)
        kernel.launch((rows * kv_heads, splits), 32, arguments)
        if splits > 1:
            from burnish.models.ops.kernels.decode_step import join

            join(sums, joints, place.position, out, reach, splits, least, kv_heads, dim, BLOCK)
    return out


_making = threading.Lock()


def _kernel(*kind: Any) -> Kernel:
    with _making:  # whole rows and cut ones may ask for it at once
        return _made(*kind)


@cache
def _made(dim: int, queries: int, is_normed: bool, device: torch.device) -> Kernel:
    stages = RING_BYTES // (4 * PAGE * dim * 2)
    return Kernel(source(dim, queries, is_normed, stages), "decode_attention", RING_BYTES + 1024)


def source(dim: int, queries: int, is_normed: bool, stages: int) -> str:
    """The kernel for heads of one kind."""
    settings = {"DIM": dim, "QUERIES": queries, "NORMED": int(is_normed), "STAGES": stages}
    defines = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    return defines + (Path(__file__).parent / "decode_attention.cu").read_text()
