"""Multi-head latent attention (2405.04434) as a projection to the heads that every attention kernel of the decoder reads.

    c = latent(x) = [c_q | c_kv | k_rope]          q = q_up(norm(c_q)),   [k | v]_h = kv_up(norm(c_kv))_h

In a fused projection the heads are expanded: every head has its own key [k_h | k_rope] and its own value. A head's dimensions are ordered so that the rotation of
half-split heads serves: one half of those without rotation, the first of each rotated pair, the other half, the second of each pair. The
rotation table (`kernels/elementwise.py`) leaves the first kind as they are. Values are padded with zeros to the width of a key head, so that
all heads of the fused projection have one width; `value_heads` removes the padding behind attention.

The learner and exact mode expand the heads. The paged engine caches latents instead (`kernels/latent_ops.py`), except in exact mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.architecture import Architecture
from burnish.models.kernels.elementwise import RMSNorm
from burnish.models.kernels.latent_ops import LatentHeads
from burnish.models.latent_shape import LatentShape

LATENT_EPS = 1e-6
"""Epsilon of the norms of the latents, whatever that of the other norms is (as in transformers)."""
Project = Callable[[nn.Linear, Tensor], Tensor]


class LatentProjection(nn.Module):
    """The projections of latent attention from the hidden state to fused query, key and value heads."""

    def __init__(self, arch: Architecture, shape: LatentShape) -> None:
        super().__init__()
        self.shape, self.query_scale = shape, arch.query_scale
        self.latent = nn.Linear(arch.hidden_size, shape.latent_size, bias=arch.qkv_bias)
        self.q_up = nn.Linear(shape.query_rank or arch.hidden_size, arch.num_heads * shape.head_dim, bias=False)
        self.kv_up = nn.Linear(shape.rank, arch.num_heads * (shape.nope_dim + shape.value_dim), bias=False)
        self.kv_norm = RMSNorm(shape.rank, LATENT_EPS)
        if shape.query_rank is not None:
            self.q_norm = RMSNorm(shape.query_rank, LATENT_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Fused heads [N, 3 * heads * D] of normed hidden states [N, hidden]."""
        return self.project(x, nn.Linear.__call__)

    def project(self, x: Tensor, linear: Project) -> Tensor:
        """`forward` with another product, such as a batch-invariant one."""
        q, latent, k_rope = self._latents(x, linear)
        return fused_heads(q, linear(self.kv_up, latent), k_rope, self.shape)

    def heads(self, x: Tensor) -> LatentHeads:
        """Queries, latents and shared keys of normed hidden states [N, hidden], for a cache of latents."""
        q, latent, k_rope = self._latents(x, nn.Linear.__call__)
        q = q.view(q.shape[0], -1, self.shape.head_dim)
        return LatentHeads(q, latent, k_rope, self.kv_up, self.shape, _table_scale(self.query_scale, q.dtype))

    def _latents(self, x: Tensor, linear: Project) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, heads * D], the normed latent [N, rank] and the shared key [N, rope_dim]."""
        shape = self.shape
        c_q, c_kv, k_rope = linear(self.latent, x).split([shape.query_rank or 0, shape.rank, shape.rope_dim], 1)
        q = linear(self.q_up, x if shape.query_rank is None else _norm(self.q_norm, c_q))
        return q, _norm(self.kv_norm, c_kv), k_rope


@cache
def _table_scale(query_scale: float, dtype: torch.dtype) -> float:
    """The factor of scores without rotation, as rounded by the rotation table, which multiplies queries and keys by its root."""
    return float((torch.ones(()) * query_scale**0.5).to(dtype)) ** 2


def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
    # The compiler fuses plain operations, and cannot trace our backward.
    return norm.functional(x) if torch.compiler.is_compiling() else norm(x.contiguous())


def fused_heads(q: Tensor, kv: Tensor, k_rope: Tensor, shape: LatentShape) -> Tensor:
    """Fused heads [N, 3 * heads * D] of queries [N, heads * D], keys and values [N, heads * ...] and the shared key [N, rope_dim]."""
    rows = q.shape[0]
    q_nope, q_rope = q.view(rows, -1, shape.head_dim).split([shape.nope_dim, shape.rope_dim], 2)
    k_nope, v = kv.view(rows, -1, shape.nope_dim + shape.value_dim).split([shape.nope_dim, shape.value_dim], 2)
    queries = _half_split(q_nope, q_rope, shape)
    keys = _half_split(k_nope, k_rope[:, None].expand(-1, k_nope.shape[1], -1), shape)
    return torch.cat([queries, keys, functional.pad(v, (0, shape.head_dim - shape.value_dim))], 1).flatten(1)


def _half_split(nope: Tensor, rope: Tensor, shape: LatentShape) -> Tensor:
    first, second = (rope[..., 0::2], rope[..., 1::2]) if shape.interleaved else rope.chunk(2, -1)
    low, high = nope.chunk(2, -1)
    return torch.cat([low, first, high, second], -1)


def value_heads(mixed: Tensor, shape: LatentShape) -> Tensor:
    """Attention outputs [N, heads * D] without the padding of the values; [N, heads * value_dim]."""
    return mixed.view(mixed.shape[0], -1, shape.head_dim)[..., : shape.value_dim].flatten(1)
