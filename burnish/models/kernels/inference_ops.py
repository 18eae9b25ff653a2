"""Operations of the native engine's forward pass over a paged KV cache (`paged_cache.py`).

Each runs as a Triton or CUDA kernel on a GPU and through torch elsewhere: residual with norm, rotation with cache write,
decode and prefill attention, split-K linear layers, and the fused gated MLP projection.
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
from burnish.models.kernels.cuda.products import gated_product, has_gated_product
from burnish.models.kernels.device import to_device, use_triton
from burnish.models.kernels.elementwise import rms_norm, rotate
from burnish.models.kernels.fp8 import Fp8Rows, empty_rows, quantise_rows
from burnish.models.kernels.half_products import PLAIN_LINEARS
from burnish.models.kernels.logprob import softcapped
from burnish.models.kernels.paged_cache import HeadNorms, Pages, Placement, read_pages, write_pages
from burnish.models.kernels.picture_attention import PictureAttention

SPLIT_K_TILE = 128
"""Rows and outputs of a matmul tile, as the choice of split-K assumes."""
PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200; another GPU's count would change the choice slightly."""
MIN_INPUTS = {2: 1536, 4: 8192}
"""Inputs from which a number of split-K parts pays off."""


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """Add `delta` to x in place, then return the RMS norm of x times (shift + weight); [N, hidden].

    Partial sums [P, N, hidden] of `partial_linear` are summed first.
    """
    if use_triton(x):
        from burnish.models.kernels.triton import elementwise_kernels

        out = torch.empty_like(x)
        elementwise_kernels.add_norm(x, delta, weight, eps, shift, out)
        return out
    if delta is not None:
        x += delta if delta.dim() == 2 else delta.sum(0, dtype=torch.promote_types(delta.dtype, torch.float32))
    return rms_norm(x, weight, eps, shift)


def add_norm_rows(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0) -> Fp8Rows:
    """`add_norm` with its result in 8 bits."""
    if use_triton(x):
        from burnish.models.kernels.triton import elementwise_kernels

        rows = empty_rows(x.shape, x.device)
        elementwise_kernels.add_norm(x, delta, weight, eps, shift, rows.data, rows.scale)
        return rows
    return quantise_rows(add_norm(x, delta, weight, eps, shift))


def rotate_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    placement: Placement,
    norms: HeadNorms | None,
    keys: Pages,
    values: Pages,
    in_place: bool = False,
) -> Tensor:
    """Rotate queries and keys of a fused projection [N, heads * D] and write keys and values to the cache.

    Returns the rotated queries [N, heads, D]. With `in_place` the keys within `qkv` are rotated too.
    """
    if use_triton(qkv):
        from burnish.models.kernels.triton import elementwise_kernels

        return elementwise_kernels.rotate_store(qkv, cos, sin, placement, norms, keys, values, in_place)
    _, kv_heads, page, dim = keys.shape
    position = placement.position
    heads = qkv.view(qkv.shape[0], -1, dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (rms_norm(x, weight, norms.eps, norms.shift) for x, weight in ((q, norms.query), (k, norms.key)))
        q = q if norms.query_scale == 1.0 else q * norms.query_scale
    q, k = (rotate(x, cos[placement.turn], sin[placement.turn]) for x in (q, k))
    where = placement.table[placement.owner, position.clamp(min=0) // page].long().masked_fill(position < 0, 0)
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
    placement: Placement,
    norms: HeadNorms | None,
    keys: Pages,
    values: Pages,
    window: int | None,
    splits: int = 1,
    least: int = 64,
    softcap: float | None = None,
    shares_pages: bool = False,
) -> Tensor:
    """Attention of each row's new token over its cached past and itself, from its fused projection; [rows, heads * D].

    Token i belongs to row i of the table. On a GPU the keys of a row are divided into up to `splits` ranges of at least
    `least` keys (flash decoding). With `shares_pages` the past of a row may contain new tokens of other rows: all keys and values are then
    written before any row reads them.
    """
    if use_triton(qkv):
        if shares_pages:
            rotate_store(qkv, cos, sin, placement, norms, keys, values)
        stores = not shares_pages
        from burnish.models.kernels.cuda import hopper
        from burnish.models.kernels.triton.decode_attention import decode_attention as triton_decode_attention

        if softcap is None and hopper.has_decode_attention(qkv, cos, placement, norms, keys, values):
            return hopper.decode_attention(qkv, cos, sin, placement, norms, keys, values, window, splits, least, stores)
        return triton_decode_attention(
            qkv, cos, sin, placement, norms, keys, values, window, splits, least, softcap, stores
        )
    q = rotate_store(qkv, cos, sin, placement, norms, keys, values)
    return attend_pages(q, keys, values, placement, window, softcap)


def attend_pages(
    q: Tensor, keys: Pages, values: Pages, placement: Placement, window: int | None, softcap: float | None = None
) -> Tensor:
    """Attention of each row's query [rows, heads, D] over its pages, in torch; [rows, heads * D]."""
    rows, heads, dim = q.shape
    position, table = placement.position, placement.table
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
    scores = scores if softcap is None else softcapped(scores, softcap)
    # An empty row would be NaN: it gets its first column, and its result is not used.
    seen[:, 0] |= position < 0
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    # Stale entries of a page may be NaN, and 0 * NaN is NaN.
    return (weights @ v.masked_fill(~seen[:, None, :, None], 0)).view(rows, heads * dim)


def gather_pages(pages: Pages, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Gather the first `length` tokens of every row; [rows, kv_heads, length, D]."""
    page = pages.shape[2]
    found = read_pages(pages, table[:, : -(-length // page)].long(), dtype)  # [rows, pages, kv_heads, page, D]
    return found.transpose(1, 2).flatten(2, 3)[:, :, :length]


class PrefillAttention:
    """Attention of prefill chunks over their rows' cached past and themselves.

    It is planned once for a forward pass and called by every layer; `rotations` has each layer's table. If a chunk
    continues a row (a shared prompt prefix, a long prompt in chunks), keys and values are read back from the pages. The
    forward pass has just written the new ones there, so a prefix computed by another chunk of the same pass needs no
    special case. The new tokens are the last of their row, so the causal mask is aligned at the end. Tokens of `pictures` see each other.
    """

    def __init__(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        placement: Placement,
        rotations: Sequence[tuple[Tensor, Tensor]],
        page: int,
        windows: Windows,
        softcap: float | None = None,
        pictures: PictureAttention | None = None,
    ) -> None:
        self.softcap, self.pictures = softcap, pictures
        self.rows, self.starts, self.lengths, self.ends = rows, starts, lengths, starts + lengths
        self.placement, self.rotations, self.page, self.windows = placement, rotations, page, windows
        self.q_bounds, self.k_bounds = (
            self._send(np.concatenate([[0], np.cumsum(x)]).astype(np.int32)) for x in (lengths, self.ends)
        )

    @cached_property
    def _seen(self) -> tuple[Tensor, slice, Tensor]:
        """Page index of every key that the chunks attend to."""
        position = np.concatenate([np.arange(end) for end in self.ends])
        owner, which, offset = (
            self._send(x) for x in (np.repeat(self.rows, self.ends), position // self.page, position % self.page)
        )
        return self.placement.table[owner, which].long(), slice(None), offset

    def _send(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.placement.position.device)

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None, keys: Pages, values: Pages) -> Tensor:
        # fp8 keys are read back, so that a prompt's tokens see what later tokens will see.
        reads_back = bool(self.starts.any()) or not isinstance(keys, Tensor)
        q = rotate_store(qkv, *self.rotations[layer], self.placement, norms, keys, values, in_place=not reads_back)
        if reads_back:
            k, v = (read_pages(x, self._seen, q.dtype) for x in (keys, values))  # [all ends, kv_heads, D]
        else:
            _, kv_heads, _, dim = keys.shape
            k, v = qkv.view(qkv.shape[0], -1, dim)[:, -2 * kv_heads :].split(kv_heads, 1)
        window = window_of(self.windows, layer)
        out = self._attention(q, k, v, window)
        return (out if self.pictures is None else self.pictures(out, q, k, v, window)).flatten(1)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        bounds, longest = (self.q_bounds, self.k_bounds), (int(self.lengths.max()), int(self.ends.max()))
        if self.softcap is not None and use_triton(q):
            from burnish.models.kernels.triton.packed_attention import packed_attention

            return packed_attention(q, k, v, bounds, longest, window, self.softcap)
        if self.softcap is None and has_varlen_kernel(q):
            return varlen_attention(q, k, v, bounds, longest, window)
        lengths, ends = self.lengths.tolist(), self.ends.tolist()
        parts = zip(q.split(lengths), k.split(ends), v.split(ends), strict=True)
        return torch.cat([self._one(*part, window) for part in parts])

    def _one(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Attention of one chunk [length, heads, D] over its row [end, kv_heads, D]."""
        index = torch.arange(k.shape[0], device=q.device)
        distance = index[-q.shape[0] :, None] - index
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if self.softcap is not None:
            groups = q.unflatten(0, (k.shape[0], -1))  # [kv_heads, shared, length, D]
            scores = softcapped(groups @ k[:, None].transpose(-1, -2) * q.shape[-1] ** -0.5, self.softcap)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            return (weights @ v[:, None]).flatten(0, 1).transpose(0, 1)
        gqa = q.shape[0] != k.shape[0]
        return functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=gqa).transpose(0, 1)


def num_split_k(rows: int, inputs: int, outputs: int) -> int:
    """The number of parts along the inputs that is fastest for a product."""
    tiles = -(-rows // SPLIT_K_TILE) * -(-outputs // SPLIT_K_TILE)
    fitting = [p for p, least in MIN_INPUTS.items() if inputs >= least and inputs % (p * 64) == 0]
    return max((p for p in fitting if tiles * p <= PROCESSORS), default=1)


def partial_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer to rows [N, in]; [N, out], or partial sums [P, N, out] where split-K is faster.

    A decode step multiplies a few hundred rows by a wide matrix. With few outputs this gives a few dozen tiles for over
    a hundred processors; divided along the inputs it gives several times as many. `add_norm`, which reads the result,
    sums the parts. On an H200 a product of 256 rows, 8960 inputs and 1536 outputs takes 13 instead of 18.5 microseconds.
    Each part is rounded to the model's dtype: there are as many errors as parts, each smaller by the root of their number.
    """
    outputs, inputs = module.out_features, module.in_features
    parts = (
        num_split_k(x.shape[0], inputs, outputs) if use_triton(x) and x.dtype in (torch.bfloat16, torch.float16) else 1
    )
    if parts == 1 or type(module) not in PLAIN_LINEARS or module.bias is not None:
        return module(x)
    return partial_products(x, module.weight, parts)


def partial_products(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Products [parts, N, out] over the p-th range of the inputs, without copying either factor."""
    rows = x.view(x.shape[0], parts, -1).transpose(0, 1)
    columns = weight.view(weight.shape[0], parts, -1).permute(1, 2, 0)
    return torch.bmm(rows, columns)


def gated_linear(module: nn.Linear, x: Tensor, activation: str, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """Gated activation of a gate-and-up layer on rows [N, in], fused in one kernel if possible; [N, out].

    `activation` is the name of the function `activate`.
    """
    if has_gated_kernel(module, x, activation):
        return gated_product(x, module.weight, activation)
    return activate(module(x))


def has_gated_kernel(module: nn.Linear, x: Tensor, activation: str) -> bool:
    """Whether the fused kernel can run: a plain linear layer without bias, and no gradient."""
    is_plain = type(module) in PLAIN_LINEARS and module.bias is None and not torch.is_grad_enabled()
    return is_plain and has_gated_product(x, module.weight, activation)
