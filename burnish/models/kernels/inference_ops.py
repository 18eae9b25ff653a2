"""The operations of a forward pass over a paged cache: Triton and CUDA kernels on a GPU, their torch twins elsewhere.

Pages are [P, kv_heads, page, D], one tensor (or its 8-bit form) for keys and one for values a layer; `table` [rows, width] names the pages
of each row in order. A token is located by its row and position; position -1 means a row that is not there: it sees
nothing, and what it writes goes to page 0, if anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.architecture import Windows
from burnish.models.kernels.attention import has_varlen_kernel, varlen_attention, window_of
from burnish.models.kernels.cuda.hopper import gated_product, has_gated_product
from burnish.models.kernels.device import to_device, use_triton
from burnish.models.kernels.elementwise import rms_norm, rotate
from burnish.models.kernels.paged_cache import HeadNorms, Pages, Placement, read_pages, write_pages


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """x += delta in place (if there is one), then the RMS norm of x times shift + weight; [N, hidden].

    Parts [P, N, hidden] are added up first.
    """
    if use_triton(x):
        from burnish.models.kernels.triton import elementwise_kernels

        return elementwise_kernels.add_norm(x, delta, weight, eps, shift)
    if delta is not None:
        x += delta if delta.dim() == 2 else delta.sum(0, dtype=torch.promote_types(delta.dtype, torch.float32))
    return rms_norm(x, weight, eps, shift)


def rotate_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: Placement,
    norms: HeadNorms | None,
    keys: Pages,
    values: Pages,
    in_place: bool = False,
) -> Tensor:
    """Rotated queries [N, heads, D] of a fused projection [N, heads * D]; keys and values go to their cache slots.

    `in_place` has the projection's own keys rotated too.
    """
    if use_triton(qkv):
        from burnish.models.kernels.triton import elementwise_kernels

        return elementwise_kernels.rotate_store(qkv, cos, sin, place, norms, keys, values, in_place)
    _, kv_heads, page, dim = keys.shape
    position = place.position
    heads = qkv.view(qkv.shape[0], -1, dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (rms_norm(x, weight, norms.eps, norms.shift) for x, weight in ((q, norms.query), (k, norms.key)))
        q = q if norms.query_scale == 1.0 else q * norms.query_scale
    q, k = (rotate(x, cos[position], sin[position]) for x in (q, k))
    where = place.table[place.owner, position.clamp(min=0) // page].long().masked_fill(position < 0, 0)
    at = (where, slice(None), position % page)
    write_pages(keys, at, k)
    write_pages(values, at, v)
    if in_place:
        heads[:, -2 * kv_heads : -kv_heads] = k
    return q


def decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: Placement,
    norms: HeadNorms | None,
    keys: Pages,
    values: Pages,
    window: int | None,
    splits: int = 1,
    least: int = 64,
) -> Tensor:
    """[rows, heads * D]: each row's new token, as its fused projection, against what the row holds and itself.

    Row i of the table is token i's. On a GPU rows are cut into up to `splits` stretches of at least `least` keys.
    """
    if use_triton(qkv):
        from burnish.models.kernels.cuda import hopper
        from burnish.models.kernels.triton.decode_attention import decode_attention

        if hopper.has_decode_attention(qkv, cos, place, norms, keys, values):
            assert isinstance(keys, Tensor)
            assert isinstance(values, Tensor)
            return hopper.decode_attention(qkv, cos, sin, place, norms, keys, values, window, splits, least)
        return decode_attention(qkv, cos, sin, place, norms, keys, values, window, splits, least)
    return attend_pages(rotate_store(qkv, cos, sin, place, norms, keys, values), keys, values, place, window)


def attend_pages(q: Tensor, keys: Pages, values: Pages, place: Placement, window: int | None) -> Tensor:
    """[rows, heads * D]: each row's query [rows, heads, D] against the pages it holds, by torch."""
    rows, heads, dim = q.shape
    position, table = place.position, place.table
    longest = int(position.max()) + 1
    if longest <= 0:
        return q.new_zeros(rows, heads * dim)
    k, v = (gather_pages(x, table[:rows], longest, q.dtype) for x in (keys, values))  # [rows, kv_heads, longest, D]
    column = torch.arange(longest, device=q.device)
    seen = column <= position[:, None]
    if window is not None:
        seen &= column > position[:, None] - window
    shared = heads // k.shape[1]
    scores = q.view(rows, -1, shared, dim) @ k.transpose(2, 3) * dim**-0.5
    # A row that sees nothing would be NaN: it is given its first column, and nobody reads it.
    seen[:, 0] |= position < 0
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    # What a page held before may be NaN, and 0 * NaN is too.
    return (weights @ v.masked_fill(~seen[:, None, :, None], 0)).view(rows, heads * dim)


def gather_pages(pages: Pages, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` tokens of every row as [rows, kv_heads, length, D]."""
    page = pages.shape[2]
    found = read_pages(pages, table[:, : -(-length // page)].long(), dtype)  # [rows, pages, kv_heads, page, D]
    return found.transpose(1, 2).flatten(2, 3)[:, :, :length]


# --- Attention of a prefill: stretches of new tokens against their rows' cached past and themselves.
#
# Where a stretch continues a row (a shared prompt prefix, a long prompt in chunks), keys and values are read back from the rows'
# pages, to which the forward has just written the new ones: so a prefix that another stretch of the same forward computes is no
# special case. The new tokens are the last of their row, so causality is aligned at the end.


class PrefillAttention:
    """Planned once for a forward, called by every layer; `rotations` has the table of each."""

    def __init__(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        place: Placement,
        rotations: Sequence[tuple[Tensor, Tensor]],
        page: int,
        windows: Windows,
    ) -> None:
        self.rows, self.starts, self.lengths, self.ends = rows, starts, lengths, starts + lengths
        self.place, self.rotations, self.page, self.windows = place, rotations, page, windows
        self.q_bounds, self.k_bounds = (
            self._send(np.concatenate([[0], np.cumsum(x)]).astype(np.int32)) for x in (lengths, self.ends)
        )

    @cached_property
    def _seen(self) -> tuple[Tensor, slice, Tensor]:
        """Where every token that is seen lies among the pages."""
        position = np.concatenate([np.arange(end) for end in self.ends])
        owner, which, offset = (
            self._send(x) for x in (np.repeat(self.rows, self.ends), position // self.page, position % self.page)
        )
        return self.place.table[owner, which].long(), slice(None), offset

    def _send(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.place.position.device)

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None, keys: Pages, values: Pages) -> Tensor:
        # What is kept in 8 bits is attended to as it is kept.
        reads_back = bool(self.starts.any()) or not isinstance(keys, Tensor)
        q = rotate_store(qkv, *self.rotations[layer], self.place, norms, keys, values, in_place=not reads_back)
        if reads_back:
            k, v = (read_pages(x, self._seen, q.dtype) for x in (keys, values))  # [all ends, kv_heads, D]
        else:
            _, kv_heads, _, dim = keys.shape
            k, v = qkv.view(qkv.shape[0], -1, dim)[:, -2 * kv_heads :].split(kv_heads, 1)
        return self._attention(q, k, v, window_of(self.windows, layer)).flatten(1)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if has_varlen_kernel(q):
            longest = int(self.lengths.max()), int(self.ends.max())
            return varlen_attention(q, k, v, (self.q_bounds, self.k_bounds), longest, window)
        lengths, ends = self.lengths.tolist(), self.ends.tolist()
        parts = zip(q.split(lengths), k.split(ends), v.split(ends), strict=True)
        return torch.cat([self._one(*part, window) for part in parts])

    def _one(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """One stretch, [length, heads, D] against [end, kv_heads, D]."""
        index = torch.arange(k.shape[0], device=q.device)
        distance = index[-q.shape[0] :, None] - index
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        gqa = q.shape[0] != k.shape[0]
        return functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=gqa).transpose(0, 1)


# --- A matrix product of few rows, as partial sums over its inputs: enough pieces to keep a whole GPU busy.
#
# Decoding multiplies a few hundred rows by a wide matrix. With few outputs that makes a couple of dozen tiles for over a
# hundred processors; cut over the inputs it makes several times as many, whose sums are added by whoever reads them next
# (`ops/paged.py: add_norm`). On an H200 a product of 256 rows, 8960 inputs and 1536 outputs takes 13 instead of 18.5
# microseconds. Each part is rounded to the model's type: as many errors as parts, each smaller by the root of their number.

SPLIT_K_TILE = 128
PROCESSORS = 132
"""Of an H100 or H200; another GPU's count would move the choice a little."""
MIN_INPUTS = {2: 1536, 4: 8192}
"""Inputs from which on so many parts pay."""


def num_split_k(rows: int, inputs: int, outputs: int) -> int:
    """How many parts a product is best cut into."""
    tiles = -(-rows // SPLIT_K_TILE) * -(-outputs // SPLIT_K_TILE)
    fitting = [p for p, least in MIN_INPUTS.items() if inputs >= least and inputs % (p * 64) == 0]
    return max((p for p in fitting if tiles * p <= PROCESSORS), default=1)


def partial_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """The layer on rows [N, in]: [N, out], or parts [P, N, out] that add up to it where that is faster."""
    outputs, inputs = module.out_features, module.in_features
    parts = (
        num_split_k(x.shape[0], inputs, outputs) if use_triton(x) and x.dtype in (torch.bfloat16, torch.float16) else 1
    )
    if parts == 1 or type(module) is not nn.Linear or module.bias is not None:
        return module(x)
    return partial_products(x, module.weight, parts)


def partial_products(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """[parts, N, out]: part p is the product over the p-th stretch of the inputs; no copy of either is made."""
    rows = x.view(x.shape[0], parts, -1).transpose(0, 1)
    columns = weight.view(weight.shape[0], parts, -1).permute(1, 2, 0)
    return torch.bmm(rows, columns)


# --- The gated half of an MLP without gradient: in one kernel where there is one, else a product and an activation.


def gated_linear(module: nn.Linear, x: Tensor, activation: str, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """`activate`, which is called `activation`, of a gate-and-up layer on rows [N, in]: [N, out]."""
    if has_gated_kernel(module, x, activation):
        return gated_product(x, module.weight, activation)
    return activate(module(x))


def has_gated_kernel(module: nn.Linear, x: Tensor, activation: str) -> bool:
    """Whether one kernel makes it: the layer is plain, and nobody asks for a gradient."""
    is_plain = type(module) is nn.Linear and module.bias is None and not torch.is_grad_enabled()
    return is_plain and has_gated_product(x, module.weight, activation)
