"""CUDA kernels for Hopper GPUs: decode attention, and the gated MLP projection.

Decode attention (`decode_attention.cu`) loads pages by TMA, with one warp for each row and key head. It computes the same
as `kernels/triton/decode_attention.py`, which supports every GPU, dtype and head size, with fewer instructions per key,
and runs at memory bandwidth.

The gated projection (`gated_product.cu`) computes act(x gate^T) * (x up^T) in one kernel. Gate and up are a layer's
largest product, and fused with the activation its outputs are never written to memory. Triton's tiles are powers of two
while layer sizes are not: with 140 tiles, 132 processors would wait for the last eight. Here the tile width is chosen so
that all processors finish together (`choose_tile`).
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.models.kernels.cuda.cuda_driver import Kernel, nvrtc_library, tensor_map
from burnish.models.kernels.paged_cache import HeadNorms, Placement, decode_buffers

PAGE = 16
DIMS = (64, 128)
BLOCK = 32
"""A split has a multiple of this many keys; the CUDA kernel and `combine_splits` assume the same."""
MAX_QUERIES = 8
"""Query heads per key head: the width of a tensor-core tile."""
RING_BYTES = 32 * 1024
"""Bytes in flight to a warp: two steps of 32 keys with heads of 128."""

TILE_WIDTHS = (72, 56, 40)
"""Outputs of a tile: odd multiples of eight, limited by the accumulator registers."""
WARP_GROUPS = {64: (1, 1), 128: (2, 1), 192: (3, 1), 256: (2, 2)}
"""Rows of a tile: (consumer warp groups, blocks of 64 rows of each)."""
REGISTERS_PER_THREAD = {1: 232, 2: 240, 3: 160}
"""Registers of a consumer thread by the number of warp groups: what the producer threads, with 24 each, leave of a block's."""
SHARED_BYTES = 227 * 1024 - 2048
"""Shared memory for stages and output strips: a processor's, less barriers and the alignment of the ring."""
MAX_STAGES = 8
TILE_OVERHEAD = 24
"""Fixed cost of a tile (prologue and epilogue), in columns."""
GATED_PRODUCT_ACTIVATIONS = ("silu", "gelu_tanh")


def has_decode_attention(
    qkv: Tensor, cos: Tensor, placement: Placement, norms: HeadNorms | None, keys: object, values: object
) -> bool:
    """Whether the decode attention kernel supports these tensors."""
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.is_cuda and qkv.shape[0] > 0):
        return False
    _, kv_heads, page, dim = keys.shape
    weights = () if norms is None else (norms.query, norms.key)
    return (
        page == PAGE
        and dim in DIMS
        and qkv.shape[1] // dim // kv_heads - 2 <= MAX_QUERIES
        and values.shape == keys.shape
        and all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in (qkv, cos, keys, values, *weights))
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
    keys: Tensor,
    values: Tensor,
    window: int | None,
    splits: int,
    least: int,
) -> Tensor:
    """`burnish.models.kernels.inference_ops.decode_attention`, if `has_decode_attention`; [rows, heads * D]."""
    pages, kv_heads, page, dim = keys.shape
    rows, columns = qkv.shape
    queries = columns // dim // kv_heads - 2
    out, sums, joints = decode_buffers(qkv, kv_heads, dim, splits)
    reach = window if window is not None else 1 << 30
    q_norm, k_norm, eps, shift, factor = norms or HeadNorms(qkv, qkv, 0.0)
    with torch.cuda.device(qkv.device):
        maps = [  # the outermost dimension, the half of a head, has a smaller stride than the rows; TMA allows that
            tensor_map(
                x.data_ptr(), (64, pages * kv_heads * page, dim // 64), (dim * 2, 128), (64, page, dim // 64), True
            )
            for x in (keys, values)
        ]
        places = placement.table, placement.position, placement.turn
        tensors = (qkv, q_norm, k_norm, cos, sin, keys, values, *places, out, sums, joints)
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
        kernel = _attention_kernel(dim, queries, norms is not None, placement.rotation is not None, qkv.device)
        kernel.launch((rows * kv_heads, splits), 32, arguments)
        if splits > 1:
            from burnish.models.kernels.triton.decode_attention import combine_splits

            combine_splits(sums, joints, placement.position, out, reach, splits, least, kv_heads, dim, BLOCK)
    return out


_compile_lock = threading.Lock()


def _attention_kernel(*kind: Any) -> Kernel:
    with _compile_lock:  # threads may request the same kernel at once
        return _compile_attention_kernel(*kind)


@cache
def _compile_attention_kernel(
    dim: int, queries: int, is_normed: bool, is_rotated: bool, device: torch.device
) -> Kernel:
    stages = RING_BYTES // (4 * PAGE * dim * 2)
    return Kernel(attention_source(dim, queries, is_normed, stages, is_rotated), "decode_attention", RING_BYTES + 1024)


def attention_source(dim: int, queries: int, is_normed: bool, stages: int, is_rotated: bool = False) -> str:
    """Source of the decode attention kernel for one head shape; `is_rotated` if rows turn by other than their positions."""
    settings = {"DIM": dim, "QUERIES": queries, "NORMED": int(is_normed), "STAGES": stages, "ROTATED": int(is_rotated)}
    defines = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    return defines + (Path(__file__).parent / "decode_attention.cu").read_text()


# --- the gated MLP projection ---


@dataclass(frozen=True)
class Tile:
    """Outputs that a thread block computes at a time."""

    rows: int
    width: int

    @property
    def stages(self) -> int:
        """Slices of 64 inputs in flight: as many as fit in shared memory besides the output strips."""
        room = SHARED_BYTES - self.strip_bytes
        return min(MAX_STAGES, room // self.stage_bytes)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + 2 * self.width) * 64 * 2

    @property
    def strip_bytes(self) -> int:
        groups, _ = WARP_GROUPS[self.rows]
        return groups * 64 * self.width * 2

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.stages * self.stage_bytes + self.strip_bytes

    @property
    def threads(self) -> int:
        return 128 * (WARP_GROUPS[self.rows][0] + 1)


def choose_tile(rows: int, outputs: int, processors: int) -> Tile:
    """The tile with which all processors finish earliest."""
    height = next((height for height in WARP_GROUPS if height >= rows), 256)

    def cost(width: int) -> int:
        tiles = -(-rows // height) * -(-outputs // width)
        return -(-tiles // processors) * (2 * width + TILE_OVERHEAD)

    return Tile(height, min(TILE_WIDTHS, key=cost))


def has_gated_product(x: Tensor, weight: Tensor, activation: str) -> bool:
    """Whether the gated projection kernel supports rows x [N, in] and a matrix [2 out, in]."""
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.bfloat16
        and activation in GATED_PRODUCT_ACTIVATIONS
        and x.shape[0] > 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0  # TMA needs rows of a multiple of 16 bytes
        and weight.shape[0] % 16 == 0
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and nvrtc_library() is not None
    )


def gated_product(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """act(x gate^T) * (x up^T), [N, out]; `weight` [2 out, in] has gate above up."""
    (rows, inputs), outputs = x.shape, weight.shape[0] // 2
    with torch.cuda.device(x.device):
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        tile = choose_tile(rows, outputs, processors)
        out = x.new_empty(rows, outputs)
        row_tiles, column_tiles = -(-rows // tile.rows), -(-outputs // tile.width)
        maps = [
            tensor_map(x.data_ptr(), (inputs, rows), (inputs * 2,), (64, tile.rows), True),
            tensor_map(weight.data_ptr(), (inputs, 2 * outputs), (inputs * 2,), (64, tile.width), True),
            tensor_map(out.data_ptr(), (outputs, rows), (outputs * 2,), (tile.width, 16), False),
        ]
        sizes = map(ctypes.c_int, (rows, outputs, -(-inputs // 64), row_tiles, column_tiles))
        kernel = _gated_kernel(tile, activation, x.device)
        kernel.launch((min(row_tiles * column_tiles, processors), 1), tile.threads, [*maps, *sizes])
    return out


def all_tiles(max_rows: int, outputs: int, processors: int) -> list[Tile]:
    """All tiles that products of up to `max_rows` rows use."""
    counts = {*WARP_GROUPS, *range(256, max_rows, 256), max_rows}
    return sorted({choose_tile(rows, outputs, processors) for rows in counts}, key=lambda tile: (tile.rows, tile.width))


def compile_gated_kernel(tile: Tile, activation: str, device: torch.device) -> None:
    """Compile and load the kernel of a tile ahead of its use."""
    with torch.cuda.device(device):
        _gated_kernel(tile, activation, device)


@cache
def _gated_kernel(tile: Tile, activation: str, device: torch.device) -> Kernel:
    return Kernel(gated_source(tile, activation), "gated_product", tile.shared_bytes)


def gated_source(tile: Tile, activation: str) -> str:
    """Source of the gated projection kernel for a tile."""
    groups, blocks = WARP_GROUPS[tile.rows]
    settings = {"ROWS": tile.rows, "WIDTH": tile.width, "STAGES": tile.stages, "GROUPS": groups, "BLOCKS": blocks}
    settings |= {"MOST": REGISTERS_PER_THREAD[groups], "GELU": int(activation == "gelu_tanh")}
    text = (Path(__file__).parent / "gated_product.cu").read_text()
    defines = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    return defines + text.replace("//MULTIPLY", _wgmma_function(2 * tile.width))


def _wgmma_function(columns: int) -> str:
    """The CUDA function `multiply`: wgmma of 64 rows x 16 inputs by `columns`, added to the sums if `more`."""
    registers = columns // 2
    operands = ", ".join(f"%{i}" for i in range(registers))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(registers))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    return f"""__device__ __forceinline__ void multiply(float (&sums)[{registers}], u64 lines, u64 columns, int more) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{registers + 2}, 0;\\n"
        "{instruction} {{{operands}}}, %{registers}, %{registers + 1}, p, 1, 1, 0, 0;\\n}}"
        : {sums}
        : "l"(lines), "l"(columns), "r"(more));
}}"""
