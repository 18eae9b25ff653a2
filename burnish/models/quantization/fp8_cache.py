"""Keys and values in 8 bits: each head's vector as e4m3 floats and one scale that brings its largest number to their end.

Half the memory of bfloat16, and half of what a decode step reads of the past. The scale is of the vector itself, so nothing
has to be measured beforehand and no outlier of another token costs precision. Rounding changes the model that samples a
little: the gap to the learner shows in the mismatch metrics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = 448.0  # that e4m3 holds
SCALE_BYTES = 4


class Quantised(NamedTuple):
    """Pages of keys or of values: `data` [P, kv_heads, page, D] in 8 bits, `scale` [P, kv_heads, page] in float32."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """As if they were plain numbers."""
        return self.data.shape


Pages = Tensor | Quantised
"""Keys or values of one layer, [P, kv_heads, page, D]."""


class QuantisedCache:
    """All layers: `data` [layers, 2, P, kv_heads, page, D], `scale` [layers, 2, P, kv_heads, page]."""

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data, self.scale = data, scale

    def __getitem__(self, layer: int) -> tuple[Quantised, Quantised]:
        keys, values = (Quantised(self.data[layer, k], self.scale[layer, k]) for k in (0, 1))
        return keys, values


Cache = Tensor | QuantisedCache
"""`cache[layer]` are its keys and its values."""


def quantise(x: Tensor) -> Quantised:
    """Vectors [..., D] in 8 bits."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest > 0, largest * (1 / LARGEST), 1.0)
    return Quantised((wide / scale[..., None]).to(EIGHT_BITS), scale)


def read(pages: Pages, index: Any, dtype: torch.dtype) -> Tensor:
    """`pages[index]` (an index that keeps the last dimension whole) in the type of the arithmetic."""
    if isinstance(pages, Tensor):
        return pages[index]
    data = pages.data.view(torch.uint8)[index].view(EIGHT_BITS)  # bytes can be indexed everywhere
    return (data.float() * pages.scale[index][..., None]).to(dtype)


def write(pages: Pages, index: Any, x: Tensor) -> None:
    """`pages[index] = x`."""
    if isinstance(pages, Tensor):
        pages[index] = x
        return
    data, scale = quantise(x)
    pages.data.view(torch.uint8)[index] = data.view(torch.uint8)
    pages.scale[index] = scale
