"""burnish.models.kernels.paged_layout"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


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


def results_of(qkv: Tensor, kv_heads: int, dim: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what a decode step finds, [rows, heads * D]; and for the sums, largest scores and totals of stretches, where rows are cut."""
    rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    count = rows * heads * splits if splits > 1 else 0
    sums, joints = (torch.empty(count, n, dtype=torch.float32, device=qkv.device) for n in (dim, 2))
    return qkv.new_empty(rows, heads * dim), sums, joints
