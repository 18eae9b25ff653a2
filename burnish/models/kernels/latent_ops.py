"""Latent attention over a paged cache of latents (DeepSeek-V2, 2405.04434): 576 numbers a token and layer in place of 49,152.

The cache has two vectors of a token: its normed latent c (pages of `rank` numbers) and the rotated key k that all heads share (pages of
`rope_dim` numbers). Decode steps never expand them. With W_k and W_v the parts of `kv_up` of a head,

    q_nope (W_k c) = (W_k^T q_nope) c          sum_i w_i W_v c_i = W_v (sum_i w_i c_i)

so the query is multiplied by W_k once, the heads attend to the latents themselves, and W_v is applied to the sum. Prefill expands the
latents of its rows: with many queries to a key the expanded heads need fewer operations.

The ranks of an engine divide the heads, and every head reads all latents. So that ranks do not hold the same latents, they divide the
blocks of the cache as well (vLLM calls this decode context parallelism): page p is on rank p modulo their number. In a decode step they
gather each other's queries, attend to their own pages, and exchange results, which the heads' rank combines by their softmax totals.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.kernels.device import use_triton
from burnish.models.kernels.elementwise import rotate
from burnish.models.kernels.half_products import PLAIN_LINEARS
from burnish.models.kernels.inference_ops import PrefillAttention, gather_pages
from burnish.models.kernels.paged_cache import HeadNorms, Pages, Placement, read_pages, write_pages
from burnish.models.latent_shape import LatentShape

LOG2_E = 1.4426950408889634


class LatentHeads(NamedTuple):
    """What latent attention computes of new tokens before their rotation."""

    q: Tensor  # [N, heads, nope_dim + rope_dim]
    latent: Tensor  # [N, rank], normed
    k_rope: Tensor  # [N, rope_dim]
    kv_up: nn.Linear
    shape: LatentShape
    query_scale: float


class CacheRanks(Protocol):
    """The ranks that divide the pages of a cache."""

    @property
    def index(self) -> int:
        """This rank among them."""

    @property
    def num(self) -> int: ...

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks [num, ...]."""

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of `parts` [num, ...] to rank i; return what the ranks sent to this one."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""


def own_pages(pages: Tensor, ranks: CacheRanks) -> tuple[Tensor, Tensor]:
    """Where this rank has the pages of these numbers, and whether it has them. Page 0 of its memory stands for those of others."""
    is_own = pages % ranks.num == ranks.index
    return torch.where(is_own, pages // ranks.num + 1, 0), is_own


def num_own_pages(num_pages: int, ranks: CacheRanks) -> int:
    """Pages of a rank's memory for its part of a cache of `num_pages`."""
    return -(-num_pages // ranks.num) + 1


def own_placement(placement: Placement, num_rows: int, page: int, ranks: CacheRanks) -> tuple[Placement, Placement]:
    """Placements of a decode step's tokens within a rank's part of the cache: where they are written, and what they attend to.

    The second has the rank's own pages of each row, one after the other, and as positions the numbers of keys in them less one.
    """
    table, position = placement.table[:num_rows], placement.position
    local, is_own = own_pages(table, ranks)
    last = position.clamp(min=0)[:, None] // page
    column = torch.arange(table.shape[1], device=table.device)
    seen = is_own & (column <= last) & (position >= 0)[:, None]
    target = torch.where(seen, seen.cumsum(1) - 1, table.shape[1])  # pages of others go to a column that is cut off
    found = local.new_zeros(num_rows, table.shape[1] + 1).scatter_(1, target, local)[:, :-1]
    missing = torch.where(seen.gather(1, last.long())[:, 0], page - 1 - position % page, 0)
    num_keys = seen.sum(1) * page - missing
    here = (num_keys - 1).to(position.dtype)
    return Placement(placement.owner, position, local), Placement(placement.owner, here, found.contiguous())


def store_latents(
    heads: LatentHeads, cos: Tensor, sin: Tensor, placement: Placement, latents: Pages, keys: Pages
) -> tuple[Tensor, Tensor]:
    """Write the latents and the rotated keys of new tokens to the cache.

    Returns the rotated part of the queries [N, heads, rope_dim] and the keys [N, rope_dim]. `cos` and `sin` are the tables of whole heads.
    """
    if use_triton(heads.q):
        from burnish.models.kernels.triton.latent_decode import store_latents as triton_store

        return triton_store(heads, cos, sin, placement, latents, keys)
    shape, position = heads.shape, placement.position
    tables = [_rotated_part(table, shape)[position] for table in (cos, sin)]
    together = torch.cat([heads.q[..., shape.nope_dim :], heads.k_rope[:, None]], 1)
    if shape.interleaved:
        together = torch.cat([together[..., 0::2], together[..., 1::2]], -1)
    turned = rotate(together, *tables)
    q_rope, k_rope = turned[:, :-1], turned[:, -1]
    page = latents.shape[2]
    where = placement.table[placement.owner, position.clamp(min=0) // page].long().masked_fill(position < 0, 0)
    at = (where, 0, position % page)
    write_pages(latents, at, heads.latent)
    write_pages(keys, at, k_rope)
    return q_rope, k_rope


def _rotated_part(table: Tensor, shape: LatentShape) -> Tensor:
    """The columns of a table of whole heads [P, 1, D] that belong to the rotated dimensions."""
    low, high = table.chunk(2, -1)
    still = shape.nope_dim // 2
    return torch.cat([low[..., still:], high[..., still:]], -1)


def latent_decode(
    heads: LatentHeads,
    cos: Tensor,
    sin: Tensor,
    placement: Placement,
    latents: Pages,
    keys: Pages,
    splits: int = 1,
    least: int = 64,
    own: tuple[CacheRanks, Placement] | None = None,
) -> Tensor:
    """Attention of each row's new token over its cached past and itself; [rows, heads * value_dim].

    On a GPU the keys of a row are divided into up to `splits` ranges of at least `least` keys. If ranks divide the cache, `own` has them and
    the rank's pages (`own_placement`).
    """
    q_rope, _ = store_latents(heads, cos, sin, placement, latents, keys)
    w_k, w_v = up_matrices(heads)
    q, head_dim = absorbed_queries(heads, w_k), heads.shape.head_dim
    if own is None:
        return expanded_values(_attended(q, q_rope, latents, keys, placement, head_dim, splits, least)[0], w_v)
    ranks, here = own
    # [num, rows, heads, rank + rope] to [rows, num * heads, ...]
    every = ranks.gather(torch.cat([q, q_rope], -1)).transpose(0, 1).flatten(1, 2)
    all_q, all_rope = (x.contiguous() for x in every.split([q.shape[2], q_rope.shape[2]], -1))
    mixed, joint = _attended(all_q, all_rope, latents, keys, here, head_dim, splits, least)
    mixed, joint = (
        ranks.exchange(x.unflatten(1, (ranks.num, -1)).transpose(0, 1).contiguous()) for x in (mixed, joint)
    )
    # A row without keys has no weights on any rank, and its result is not used.
    weights = torch.exp2(joint - joint.amax(0).clamp(min=torch.finfo(joint.dtype).min))
    weights = weights / weights.sum(0).clamp(min=1e-30)
    return expanded_values((mixed * weights[..., None]).sum(0).to(q.dtype), w_v)


def _attended(
    q: Tensor, q_rope: Tensor, latents: Pages, keys: Pages, placement: Placement, head_dim: int, splits: int, least: int
) -> tuple[Tensor, Tensor]:
    if not use_triton(q):
        return attend_latents(q, q_rope, latents, keys, placement, head_dim)
    from burnish.models.kernels.triton.latent_decode import attend_latents as triton_attend

    return triton_attend(q, q_rope, latents, keys, placement, head_dim, splits, least)


def up_matrices(heads: LatentHeads) -> tuple[Tensor, Tensor]:
    """The matrices of keys [heads, nope_dim, rank] and of values [heads, value_dim, rank] in `kv_up`."""
    shape, module = heads.shape, heads.kv_up
    if type(module) in PLAIN_LINEARS:
        weight = module.weight
    else:  # adapters, or 4 bits: the product with the identity is the matrix, whatever the layer does
        weight = module(torch.eye(shape.rank, dtype=heads.q.dtype, device=heads.q.device)).t().contiguous()
    w_k, w_v = weight.view(heads.q.shape[1], -1, shape.rank).split([shape.nope_dim, shape.value_dim], 1)
    return w_k, w_v


def absorbed_queries(heads: LatentHeads, w_k: Tensor) -> Tensor:
    """query_scale W_k^T q_nope of every head; [N, heads, rank]."""
    q = heads.q[..., : heads.shape.nope_dim].transpose(0, 1)
    # The factor is part of the product, so that it costs no rounding.
    found = torch.baddbmm(q.new_empty(1), q, w_k, beta=0, alpha=heads.query_scale)
    return found.transpose(0, 1)


def expanded_values(mixed: Tensor, w_v: Tensor) -> Tensor:
    """W_v of every head's weighted sum of latents [N, heads, rank]; [N, heads * value_dim]."""
    return torch.bmm(mixed.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1).flatten(1)


def attend_latents(
    q: Tensor, q_rope: Tensor, latents: Pages, keys: Pages, placement: Placement, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Attention of queries [rows, heads, rank] and [rows, heads, rope] over their rows, in torch.

    Returns weighted sums of the latents [rows, heads, rank], and the base-2 logarithms of the softmax totals [rows, heads].
    """
    position, table = placement.position, placement.table
    longest = int(position.max()) + 1
    if longest <= 0:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    rows = q.shape[0]
    c, k = (gather_pages(x, table[:rows], longest, q.dtype)[:, 0] for x in (latents, keys))  # [rows, longest, ...]
    unseen = torch.arange(longest, device=q.device) > position[:, None]
    # Stale entries of a page may be NaN, and 0 * NaN is NaN.
    c = c.masked_fill(unseen[:, :, None], 0)
    scores = (q @ c.transpose(1, 2) + q_rope @ k.transpose(1, 2)) * head_dim**-0.5
    scores = scores.masked_fill(unseen[:, None], -torch.inf)
    joint = scores.logsumexp(-1)
    weights = (scores - joint.masked_fill(joint == -torch.inf, 0)[..., None]).exp()
    return weights @ c, joint * LOG2_E


class LatentPrefill(PrefillAttention):
    """Attention of prefill chunks over expanded latents: those of the chunks, or of their whole rows if they continue rows."""

    ranks: CacheRanks | None = None
    """The ranks that divide the cache, if several do."""

    def __call__(  # type: ignore[override]  # the tokens of latent attention have no fused projection
        self, layer: int, heads: LatentHeads, norms: HeadNorms | None, latents: Pages, keys: Pages
    ) -> Tensor:
        shape, kv_up = heads.shape, heads.kv_up
        q_rope, k_rope = store_latents(heads, *self.rotations[layer], self._own_placement, latents, keys)
        c = heads.latent
        # 8-bit latents are read back, so that a prompt's tokens see what later tokens will see.
        if bool(self.starts.any()) or not isinstance(latents, Tensor):
            c, k_rope = self._read_back(latents, keys, c.dtype)
        k_nope, v = (
            kv_up(c).view(c.shape[0], -1, shape.nope_dim + shape.value_dim).split([shape.nope_dim, shape.value_dim], 2)
        )
        q = torch.cat([heads.q[..., : shape.nope_dim] * heads.query_scale, q_rope], -1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, k_nope.shape[1], -1)], -1)
        # The kernel of packed attention needs values of the width of keys.
        mixed = self._attention(q, k, functional.pad(v, (0, shape.head_dim - shape.value_dim)), None)
        return mixed[..., : shape.value_dim].flatten(1)

    @cached_property
    def _own_placement(self) -> Placement:
        place = self.placement
        return (
            place
            if self.ranks is None
            else Placement(place.owner, place.position, own_pages(place.table, self.ranks)[0])
        )

    def _read_back(self, latents: Pages, keys: Pages, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Latents and rotated keys of all rows [all ends, ...]. Each rank has some of them, and zeros in place of the others."""
        where, _, offset = self._seen
        if self.ranks is None:
            c, k = (read_pages(x, (where, 0, offset), dtype) for x in (latents, keys))
            return c, k
        where, is_own = own_pages(where, self.ranks)
        c, k = (read_pages(x, (where, 0, offset), dtype).masked_fill(~is_own[:, None], 0) for x in (latents, keys))
        c, k = self.ranks.sum(torch.cat([c, k], 1)).split([c.shape[1], k.shape[1]], 1)
        return c.contiguous(), k
