"""The operations of a forward pass over a paged cache: Triton and CUDA kernels on a GPU, their torch twins elsewhere.

Pages are [P, kv_heads, page, D], one tensor (or its 8-bit form) for keys and one for values a layer; `table` [rows, width] names the pages
of each row in order. A token is located by its row and position; position -1 means a row that is not there: it sees
nothing, and what it writes goes to page 0, if anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.models.ops.device import use_kernels
from burnish.models.ops.norm import rms_norm
from burnish.models.ops.quantised import Pages, read, write
from burnish.models.ops.rope import rotate


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one forward stand: token i at `position[i]` of row `owner[i]`, whose pages `table` names."""

    owner: Tensor  # [N]
    position: Tensor  # [N]
    table: Tensor  # [rows, width]


class Norms(NamedTuple):
    """Weights of per-head query and key norms taken before the rotation."""

    query: Tensor
    key: Tensor
    eps: float
    shift: float = 0.0
    """Added to the weights."""
    query_scale: float = 1.0
    """Normed queries are multiplied by this."""


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """x += delta in place (if there is one), then the RMS norm of x times shift + weight; [N, hidden].

    Parts [P, N, hidden] are added up first.
    """
    if use_kernels(x):
        from burnish.models.ops.kernels import rows

        return rows.add_norm(x, delta, weight, eps, shift)
    if delta is not None:
        x += delta if delta.dim() == 2 else delta.sum(0, dtype=torch.promote_types(delta.dtype, torch.float32))
    return rms_norm(x, weight, eps, shift)


def rotate_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: Placement,
    norms: Norms | None,
    keys: Pages,
    values: Pages,
    in_place: bool = False,
) -> Tensor:
    """Rotated queries [N, heads, D] of a fused projection [N, heads * D]; keys and values go to their cache slots.

    `in_place` has the projection's own keys rotated too.
    """
    if use_kernels(qkv):
        from burnish.models.ops.kernels import rows

        return rows.rotate_store(qkv, cos, sin, place, norms, keys, values, in_place)
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
    write(keys, at, k)
    write(values, at, v)
    if in_place:
        heads[:, -2 * kv_heads : -kv_heads] = k
    return q


def decode_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    place: Placement,
    norms: Norms | None,
    keys: Pages,
    values: Pages,
    window: int | None,
    splits: int = 1,
    least: int = 64,
) -> Tensor:
    """[rows, heads * D]: each row's new token, as its fused projection, against what the row holds and itself.

    Row i of the table is token i's. On a GPU rows are cut into up to `splits` stretches of at least `least` keys.
    """
    if use_kernels(qkv):
        from burnish.models.ops.cuda import decode_attention as hopper
        from burnish.models.ops.kernels.decode_step import decode_step

        if hopper.has_decode_attention(qkv, cos, place, norms, keys, values):
            assert isinstance(keys, Tensor)
            assert isinstance(values, Tensor)
            return hopper.decode_attention(qkv, cos, sin, place, norms, keys, values, window, splits, least)
        return decode_step(qkv, cos, sin, place, norms, keys, values, window, splits, least)
    return attend_pages(rotate_store(qkv, cos, sin, place, norms, keys, values), keys, values, place, window)


def results_of(qkv: Tensor, kv_heads: int, dim: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what a decode step finds, [rows, heads * D]; and for the sums, largest scores and totals of stretches, where rows are cut."""
    rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    count = rows * heads * splits if splits > 1 else 0
    sums, joints = (torch.empty(count, n, dtype=torch.float32, device=qkv.device) for n in (dim, 2))
    return qkv.new_empty(rows, heads * dim), sums, joints


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
    found = read(pages, table[:, : -(-length // page)].long(), dtype)  # [rows, pages, kv_heads, page, D]
    return found.transpose(1, 2).flatten(2, 3)[:, :, :length]
