"""burnish.models.kernels.paged_cache"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one forward stand: token i at `position[i]` of row `owner[i]`, whose pages `table` names."""

    owner: Tensor  # [N]
    position: Tensor  # [N]
    table: Tensor  # [rows, width]


class HeadNorms(NamedTuple):
    """Weights of per-head query and key norms taken before the rotation."""

    query: Tensor
    key: Tensor
    eps: float
    shift: float = 0.0
    """Added to the weights."""
    query_scale: float = 1.0
    """Normed queries are multiplied by this."""


def decode_buffers(qkv: Tensor, kv_heads: int, dim: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what a decode step finds, [rows, heads * D]; and for the sums, largest scores and totals of stretches, where rows are cut."""
    rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    count = rows * heads * splits if splits > 1 else 0
    sums, joints = (torch.empty(count, n, dtype=torch.float32, device=qkv.device) for n in (dim, 2))
    return qkv.new_empty(rows, heads * dim), sums, joints


# --- Keys and values in 8 bits: each head's vector as e4m3 floats and one scale that brings its largest number to their end.
#
# Half the memory of bfloat16, and half of what a decode step reads of the past. The scale is of the vector itself, so nothing
# has to be measured beforehand and no outlier of another token costs precision. Rounding changes the model that samples a
# little: the gap to the learner shows in the mismatch metrics.

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # that e4m3 holds
FP8_SCALE_BYTES = 4


class Fp8Pages(NamedTuple):
    """Pages of keys or of values: `data` [P, kv_heads, page, D] in 8 bits, `scale` [P, kv_heads, page] in float32."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """As if they were plain numbers."""
        return self.data.shape


Pages = Tensor | Fp8Pages
"""Keys or values of one layer, [P, kv_heads, page, D]."""


class Fp8Cache:
    """All layers: `data` [layers, 2, P, kv_heads, page, D], `scale` [layers, 2, P, kv_heads, page]."""

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data, self.scale = data, scale

    def __getitem__(self, layer: int) -> tuple[Fp8Pages, Fp8Pages]:
        keys, values = (Fp8Pages(self.data[layer, k], self.scale[layer, k]) for k in (0, 1))
        return keys, values


KVCache = Tensor | Fp8Cache
"""`cache[layer]` are its keys and its values."""


def quantise_fp8(x: Tensor) -> Fp8Pages:
    """Vectors [..., D] in 8 bits."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest > 0, largest * (1 / FP8_MAX), 1.0)
    return Fp8Pages((wide / scale[..., None]).to(FP8), scale)


def read_pages(pages: Pages, index: Any, dtype: torch.dtype) -> Tensor:
    """`pages[index]` (an index that keeps the last dimension whole) in the type of the arithmetic."""
    if isinstance(pages, Tensor):
        return pages[index]
    data = pages.data.view(torch.uint8)[index].view(FP8)  # bytes can be indexed everywhere
    return (data.float() * pages.scale[index][..., None]).to(dtype)


def write_pages(pages: Pages, index: Any, x: Tensor) -> None:
    """`pages[index] = x`."""
    if isinstance(pages, Tensor):
        pages[index] = x
        return
    data, scale = quantise_fp8(x)
    pages.data.view(torch.uint8)[index] = data.view(torch.uint8)
    pages.scale[index] = scale
