"""Advantages of several rewards, each normalised on its own before they are added."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.groups import Groups, normalised, trajectory_groups
from burnish.algorithms.advantages.written import lengths_in_loss, whitened
from burnish.config.errors import UserError, nearest
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_mean

EQUAL: Mapping[str, float] = MappingProxyType({})
PREFIX = "part/"


def gdpo(
    batch: Batch,
    std: Literal["group", "none"] = "group",
    eps: float = 1e-6,
    weights: Mapping[str, float] = EQUAL,
    ddof: Literal[0, 1] = 1,
) -> Tensor:
    """[S] the weighted sum of every reward part's own group-relative advantage, whitened over all tokens in the loss.

    Normalising the sum would let a part with a wide range drown the others. The parts are the sequence columns
    `part/<name>`; a part without a weight has weight 1, and one that a reward reports beside its value (`part/<name>/<key>`)
    counts only where it is given a weight. Where a part is nan (that sample has no such part) it adds 0
    and stays out of the statistics. GDPO (2601.05242).
    """
    parts = sorted(name.removeprefix(PREFIX) for name in batch.sequence if name.startswith(PREFIX))
    for name in weights:
        if name not in parts and weights[name] != 0:
            raise UserError(f"advantage gdpo has a weight for {name!r}, which is no reward part{nearest(name, parts)}")
    parts = [name for name in parts if "/" not in name or name in weights]
    if not parts:
        raise UserError("advantage gdpo adds up reward parts, but no reward of this batch has parts")
    owner, ids = trajectory_groups(batch)
    total = torch.zeros(ids.numel(), dtype=batch.sequence[PREFIX + parts[0]].dtype, device=ids.device)
    for name in parts:
        rewards = segment_mean(batch.sequence[PREFIX + name], owner, ids.numel())
        total += weights.get(name, 1.0) * _present(rewards, ids, std, eps)
    return whitened(total[owner], ddof, lengths_in_loss(batch))


def _present(rewards: Tensor, ids: Tensor, std: str, eps: float) -> Tensor:
    """[T] the normalised rewards of the trajectories that have one, among themselves; 0 for the others."""
    there = (~rewards.isnan()).nonzero().squeeze(1)
    groups = Groups(*compact_ids(ids[there]))
    return torch.zeros_like(rewards).index_copy(0, there, normalised(rewards[there], groups, std, eps))
