"""The paged KV cache: where tokens are stored, and pages in bfloat16 or fp8.

Pages of one layer are [P, kv_heads, page, D] for keys and the same for values.

In fp8 every head's vector is stored as e4m3 numbers and one float32 scale (`fp8.py`). This halves the cache's memory and
what a decode step reads. Rounding changes the sampled distribution slightly; the mismatch metrics show the gap to the learner.
Layers that cannot be rounded without harm (`models/key_rounding.py`) keep their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.models.kernels.fp8 import FP8, Fp8Rows, quantise_rows


@dataclass(frozen=True)
class Placement:
    """Cache positions of the tokens of one forward pass: token i is at `position[i]` of row `owner[i]`.

    `table` lists the pages of each row in order. Position -1 marks an empty row: it attends to nothing, and if it writes,
    it writes to page 0.
    """

    owner: Tensor  # [N]
    position: Tensor  # [N]
    table: Tensor  # [rows, width]
    rotation: Tensor | None = None  # [N]
    """Row of the rotation table that turns each token; None if it is the position, as in text."""
    last: Tensor | None = None  # [N]
    """Position of the last key that each token sees, in exact attention; None if it is its own position."""

    @property
    def turn(self) -> Tensor:
        """[N] rows of the rotation table."""
        return self.position if self.rotation is None else self.rotation


class HeadNorms(NamedTuple):
    """Per-head RMS norms of queries and keys, applied before the rotation."""

    query: Tensor
    key: Tensor
    eps: float
    shift: float = 0.0
    """Shift of the norm weights."""
    query_scale: float = 1.0
    """Factor of the normed queries."""


def decode_buffers(qkv: Tensor, kv_heads: int, dim: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output [rows, heads * D] of a decode step, and float32 buffers for the splits of long rows.

    The buffers hold each split's weighted sum of values, and its largest score and softmax total. Both are empty with one split.
    """
    rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    count = rows * heads * splits if splits > 1 else 0
    sums, joints = (torch.empty(count, n, dtype=torch.float32, device=qkv.device) for n in (dim, 2))
    return qkv.new_empty(rows, heads * dim), sums, joints


Pages = Tensor | Fp8Rows
"""Keys or values of one layer [P, kv_heads, page, D]."""


class Fp8Cache:
    """The fp8 cache: `data` [n, 2, P, kv_heads, page, D] and `scale` [n, 2, P, kv_heads, page] of the layers in 8 bits, `wide`
    [m, 2, P, kv_heads, page, D] of the others. `in_8_bits` says for each layer where it is.
    """

    def __init__(self, data: Tensor, scale: Tensor, wide: Tensor, in_8_bits: Sequence[bool]) -> None:
        self.data, self.scale, self.wide, self.in_8_bits = data, scale, wide, tuple(in_8_bits)
        self._place = [self.in_8_bits[:layer].count(own) for layer, own in enumerate(self.in_8_bits)]

    def __getitem__(self, layer: int) -> tuple[Pages, Pages]:
        place = self._place[layer]
        if not self.in_8_bits[layer]:
            return self.wide[place, 0], self.wide[place, 1]
        keys, values = (Fp8Rows(self.data[place, k], self.scale[place, k]) for k in (0, 1))
        return keys, values


class LatentCache:
    """The cache of latent attention (`latent_ops.py`): latents [layers, 1, P, 1, page, rank] and rotated keys [layers, 1, P, 1, page, rope].

    `scales` [layers, 1, P, 1, page] of both are there in fp8. The second dimension makes pages the third one, as in other caches.
    """

    def __init__(self, latents: Tensor, keys: Tensor, scales: tuple[Tensor, Tensor] | None = None) -> None:
        self.data, self.scales = (latents, keys), scales

    def __getitem__(self, layer: int) -> tuple[Pages, Pages]:
        latents, keys = (data[layer, 0] for data in self.data)
        if self.scales is None:
            return latents, keys
        of_latents, of_keys = (scale[layer, 0] for scale in self.scales)
        return Fp8Rows(latents, of_latents), Fp8Rows(keys, of_keys)


KVCache = Tensor | Fp8Cache | LatentCache
"""`cache[layer]` is the pair of the layer's keys and values, or of its latents and rotated keys."""


def read_pages(pages: Pages, index: Any, dtype: torch.dtype) -> Tensor:
    """`pages[index]` as `dtype`; the index must keep the last dimension whole."""
    if isinstance(pages, Tensor):
        return pages[index]
    data = pages.data.view(torch.uint8)[index].view(FP8)  # torch cannot index e4m3 on every device
    return (data.float() * pages.scale[index][..., None]).to(dtype)


def write_pages(pages: Pages, index: Any, x: Tensor) -> None:
    """`pages[index] = x`."""
    if isinstance(pages, Tensor):
        pages[index] = x
        return
    data, scale = quantise_rows(x)
    pages.data.view(torch.uint8)[index] = data.view(torch.uint8)
    pages.scale[index] = scale
