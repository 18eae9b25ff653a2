"""Products of a decode step for Hopper GPUs in CUDA C++ (`products.cu`), in bfloat16 and in 8 bits.

The gated projection computes act(x gate^T) * (x up^T) in one kernel. Gate and up are a layer's largest product, and fused
with the activation its outputs are never written to memory. The partial product divides the inputs of a product with few
outputs into ranges, so that all processors have work; the next norm sums the parts.

Triton's tiles are powers of two while layer sizes are not: with 140 tiles, 132 processors would wait for the last eight.
Here tile width and number of parts are chosen so that all processors finish together.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from burnish.models.kernels.cuda.cuda_driver import Kernel, nvrtc_library, tensor_map
from burnish.models.kernels.fp8 import FP8, Fp8Rows

LINE = 128
"""Bytes of a row in a slice of the inputs: 64 inputs in bfloat16, 128 in 8 bits."""
GATED_WIDTHS = (72, 56, 40)
"""Outputs of a tile of the gated projection: odd multiples of eight, limited by the accumulator registers."""
PARTIAL_WIDTHS = (136, 120, 104, 88, 72, 56, 40)
"""The same of the partial product, which has half as many columns."""
MAX_PARTS = 8
"""Most ranges of the inputs: the next norm reads as many partial sums."""
WARP_GROUPS = {64: (1, 1), 128: (2, 1), 192: (3, 1), 256: (2, 2)}
"""Rows of a tile: (consumer warp groups, blocks of 64 rows of each)."""
REGISTERS_PER_THREAD = {1: 232, 2: 240, 3: 160}
"""Registers of a consumer thread by the number of warp groups: what the producer threads, with 24 each, leave of a block's."""
SHARED_BYTES = 227 * 1024 - 2048
"""Shared memory for stages and output strips: a processor's, less barriers and the alignment of the ring."""
MAX_STAGES = 8
TILE_OVERHEAD = 24
"""Fixed cost of a tile of the gated projection (prologue and epilogue), in columns."""
GATED_PRODUCT_ACTIVATIONS = ("silu", "gelu_tanh")
PRODUCTS_PER_CLOCK = 4096
"""Multiplications of 8-bit floats of a processor in a clock."""
LOADED_PER_CLOCK = 64
"""Bytes that a processor loads from the L2 cache in a clock."""
SUMMED_PER_CLOCK = 3000
"""Bytes of partial sums that the GPU writes or reads in a clock."""
PART_CLOCKS = 1500
"""Fixed cost of a tile of a partial product, in clocks."""


@dataclass(frozen=True)
class Tile:
    """Outputs that a thread block computes at a time."""

    rows: int
    width: int
    is_gated: bool = True

    @property
    def columns(self) -> int:
        """Columns of the matrix that the tile multiplies: an output of the gated projection has two."""
        return 2 * self.width if self.is_gated else self.width

    @property
    def stages(self) -> int:
        """Slices of the inputs in flight: as many as fit in shared memory besides the output strips."""
        room = SHARED_BYTES - self.strip_bytes
        return min(MAX_STAGES, room // self.stage_bytes)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * LINE

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


def tile_height(rows: int) -> int:
    """The rows of a tile for a product of so many rows."""
    return next((height for height in WARP_GROUPS if height >= rows), 256)


def rounded_rows(rows: int) -> int:
    """The number of rows by which tiles are chosen, so that a run needs few kernels."""
    return tile_height(rows) if rows <= 256 else -(-rows // 256) * 256


def choose_tile(rows: int, outputs: int, processors: int) -> Tile:
    """The tile of a gated projection with which all processors finish earliest."""
    height = tile_height(rows)

    def cost(width: int) -> int:
        tiles = -(-rows // height) * -(-outputs // width)
        return -(-tiles // processors) * (2 * width + TILE_OVERHEAD)

    return Tile(height, min(GATED_WIDTHS, key=cost))


@cache
def choose_parts(rows: int, inputs: int, outputs: int, processors: int) -> tuple[Tile, int]:
    """The tile and the number of parts with which a product of 8-bit floats is finished and summed earliest."""
    rows, slices = rounded_rows(rows), -(-inputs // LINE)

    def cost(choice: tuple[Tile, int]) -> float:
        tile, parts = choice
        tiles = -(-rows // tile.rows) * -(-outputs // tile.width) * parts
        products = tile.rows * tile.width * LINE / PRODUCTS_PER_CLOCK
        slice_clocks = max(products, tile.stage_bytes / LOADED_PER_CLOCK)
        summing = parts * rows * outputs * 2 * 2 / SUMMED_PER_CLOCK
        return -(-tiles // processors) * (-(-slices // parts) * slice_clocks + PART_CLOCKS) + summing

    heights = [tile_height(rows), *([128] if rows > 128 else [])]
    tiles = [Tile(height, width, is_gated=False) for height in heights for width in PARTIAL_WIDTHS]
    return min(((tile, parts) for tile in tiles for parts in range(1, min(MAX_PARTS, slices) + 1)), key=cost)


# --- where the kernels run -----------------------------------------------------------------------------------------------


def _is_factor(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether TMA can load a matrix: rows of a multiple of 16 bytes."""
    return (
        x.dtype == dtype
        and x.is_contiguous()
        and x.shape[1] * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        and x.shape[0] > 0
    )


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0) and nvrtc_library() is not None


def has_gated_product(x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows, activation: str) -> bool:
    """Whether the gated projection kernel supports rows x [N, in] and a matrix [2 out, in], both in bfloat16 or in 8 bits."""
    if isinstance(x, Fp8Rows) != isinstance(weight, Fp8Rows):
        return False
    factors = [one.data if isinstance(one, Fp8Rows) else one for one in (x, weight)]
    dtype = FP8 if isinstance(x, Fp8Rows) else torch.bfloat16
    return (
        factors[0].is_cuda
        and activation in GATED_PRODUCT_ACTIVATIONS
        and all(_is_factor(one, dtype) for one in factors)
        and factors[1].shape[0] % 16 == 0
        and _has_kernels(factors[0])
    )


def has_partial_product(x: Fp8Rows, weight: Fp8Rows) -> bool:
    """Whether the kernel of partial products supports rows [N, in] and a matrix [out, in] in 8 bits."""
    factors = x.data, weight.data
    return (
        x.data.is_cuda
        and all(_is_factor(one, FP8) for one in factors)
        and weight.shape[0] % 8 == 0
        and _has_kernels(x.data)
    )


# --- the products --------------------------------------------------------------------------------------------------------


def gated_product(x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows, activation: str) -> Tensor:
    """act(x gate^T) * (x up^T) in bfloat16, [N, out]; `weight` [2 out, in] has gate above up."""
    data = x.data if isinstance(x, Fp8Rows) else x
    with torch.cuda.device(data.device):
        rows, outputs = x.shape[0], weight.shape[0] // 2
        tile = choose_tile(rows, outputs, num_processors(data.device))
        out = torch.empty(1, rows, outputs, dtype=torch.bfloat16, device=data.device)
        _launch(_kernel(tile, isinstance(x, Fp8Rows), activation, data.device), tile, x, weight, out)
    return out[0]


def partial_product(x: Fp8Rows, weight: Fp8Rows) -> Tensor:
    """Rows [N, in] times a matrix [out, in] in bfloat16: [N, out], or partial sums [P, N, out] where that is faster."""
    with torch.cuda.device(x.data.device):
        (rows, inputs), outputs = x.shape, weight.shape[0]
        tile, parts = choose_parts(rows, inputs, outputs, num_processors(x.data.device))
        out = torch.empty(parts, rows, outputs, dtype=torch.bfloat16, device=x.data.device)
        _launch(_kernel(tile, True, "none", x.data.device), tile, x, weight, out)
    return out if parts > 1 else out[0]


def num_processors(device: torch.device) -> int:
    """The multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(kernel: Kernel, tile: Tile, x: Tensor | Fp8Rows, weight: Tensor | Fp8Rows, out: Tensor) -> None:
    parts, rows, outputs = out.shape
    factors = [one.data if isinstance(one, Fp8Rows) else one for one in (x, weight)]
    inputs, size = factors[0].shape[1], factors[0].element_size()
    row_tiles, column_tiles = -(-rows // tile.rows), -(-outputs // tile.width)
    boxes = (LINE // size, tile.rows), (LINE // size, tile.width)
    maps = [
        tensor_map(one.data_ptr(), (inputs, one.shape[0]), (inputs * size,), box, True, one.dtype)
        for one, box in zip(factors, boxes, strict=True)
    ]
    maps.append(
        tensor_map(
            out.data_ptr(),
            (outputs, rows, parts),
            (outputs * 2, rows * outputs * 2),
            (tile.width, 16, 1),
            False,
            out.dtype,
        )
    )
    scales = [one.scale if isinstance(one, Fp8Rows) else out for one in (x, weight)]  # not read in bfloat16
    pointers = (ctypes.c_void_p(scale.data_ptr()) for scale in scales)
    sizes = map(ctypes.c_int, (rows, outputs, -(-inputs * size // LINE), row_tiles, column_tiles, parts))
    processors = num_processors(out.device)
    kernel.launch((min(row_tiles * column_tiles * parts, processors), 1), tile.threads, [*maps, *pointers, *sizes])


# --- compilation ---------------------------------------------------------------------------------------------------------


def all_tiles(max_rows: int, outputs: int, processors: int) -> list[Tile]:
    """All tiles that gated projections of up to `max_rows` rows use."""
    return _sorted(choose_tile(rows, outputs, processors) for rows in _row_counts(max_rows))


def all_partial_tiles(max_rows: int, inputs: int, outputs: int, processors: int) -> list[Tile]:
    """All tiles that partial products of up to `max_rows` rows use."""
    return _sorted(choose_parts(rows, inputs, outputs, processors)[0] for rows in _row_counts(max_rows))


def _row_counts(max_rows: int) -> set[int]:
    return {*WARP_GROUPS, *range(256, max_rows, 256), max_rows}


def _sorted(tiles: Iterable[Tile]) -> list[Tile]:
    return sorted(set(tiles), key=lambda tile: (tile.rows, tile.width))


def compile_product(tile: Tile, is_quantised: bool, activation: str, device: torch.device) -> None:
    """Compile and load the kernel of a tile ahead of its use."""
    with torch.cuda.device(device):
        _kernel(tile, is_quantised, activation, device)


_compile_lock = threading.Lock()
_kernel_locks: dict[object, threading.Lock] = {}


@cache
def _compiled(tile: Tile, is_quantised: bool, activation: str, device: torch.device) -> Kernel:
    return Kernel(product_source(tile, is_quantised, activation), "product", tile.shared_bytes)


def _kernel(tile: Tile, is_quantised: bool, activation: str, device: torch.device) -> Kernel:
    key = (tile, is_quantised, activation, device)
    with _compile_lock:
        lock = _kernel_locks.setdefault(key, threading.Lock())
    with lock:  # threads may need the same kernel at once; different ones compile in parallel
        return _compiled(*key)


def product_source(tile: Tile, is_quantised: bool, activation: str) -> str:
    """Source of a product's kernel for a tile; `activation` is "none" for a partial product."""
    groups, blocks = WARP_GROUPS[tile.rows]
    settings = {"ROWS": tile.rows, "WIDTH": tile.width, "STAGES": tile.stages, "GROUPS": groups, "BLOCKS": blocks}
    settings |= {"MOST": REGISTERS_PER_THREAD[groups], "GELU": int(activation == "gelu_tanh")}
    settings |= {"GATED": int(tile.is_gated), "EIGHT": int(is_quantised)}
    text = (Path(__file__).parent / "products.cu").read_text()
    defines = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    return defines + text.replace("//MULTIPLY", _wgmma_function(tile.columns, is_quantised))


def _wgmma_function(columns: int, is_quantised: bool) -> str:
    """The CUDA function `multiply`: wgmma of 64 rows x 32 bytes of inputs by `columns`, added to the sums if `more`."""
    registers = columns // 2
    operands = ", ".join(f"%{i}" for i in range(registers))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(registers))
    shape, kinds, flags = ("k32", "e4m3.e4m3", "p, 1, 1") if is_quantised else ("k16", "bf16.bf16", "p, 1, 1, 0, 0")
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}{shape}.f32.{kinds}"
    return f"""__device__ __forceinline__ void multiply(float (&sums)[{registers}], u64 lines, u64 columns, int more) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{registers + 2}, 0;\\n"
        "{instruction} {{{operands}}}, %{registers}, %{registers + 1}, {flags};\\n}}"
        : {sums}
        : "l"(lines), "l"(columns), "r"(more));
}}"""
