"""Baselines that come from preference optimisation: the soft mean of a group, and the chance to win in it."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.advantages.groups import Groups, group_rewards
from burnish.core.batch import Batch
from burnish.core.segments import segment_count


def softmean(batch: Batch, beta: float = 1.0) -> Tensor:
    """[S] r - (1/beta) log mean_g exp(beta r): the reward above the group's soft mean.

    With beta = 1/tau it is r - tau log Z of Kimi k1.5 (2501.12599); with beta = eta the reward form of SPPO (2405.00675).
    """
    owner, rewards, groups = group_rewards(batch)
    best = groups.max(rewards)  # taken out of the exponent, which would overflow
    soft = best + groups.mean((beta * (rewards - best)).exp()).log() / beta
    return groups.settled(rewards - soft, rewards, torch.zeros_like(rewards))[owner]


def win_rate(batch: Batch) -> Tensor:
    """[S] P - 1/2, P the mean chance of beating another sample of the group; a tie is half a win. SPPO (2405.00675).

    P is the sequence column `win_probability` where a preference model gave one, else it is counted from the rewards.
    """
    if "win_probability" in batch.sequence:
        return batch.sequence["win_probability"] - 0.5
    owner, rewards, groups = group_rewards(batch)
    below, equal = _below_and_equal(rewards, groups)
    wins = below + (equal - 1).to(rewards.dtype) / 2
    chance = wins / (groups.size - 1).clamp(min=1)
    return torch.where(groups.size == 1, 0.0, chance - 0.5)[owner]


def _below_and_equal(values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """[T] how many values of the same group are below each, and how many are equal to it (itself included)."""
    order = torch.argsort(values, stable=True)
    order = order[torch.argsort(groups.ids[order], stable=True)]
    rank = torch.empty_like(order).index_copy(0, order, torch.arange(order.numel(), device=order.device))
    sorted_ids, sorted_values = groups.ids[order], values[order]
    new = torch.ones_like(sorted_ids, dtype=torch.bool)
    new[1:] = (sorted_ids[1:] != sorted_ids[:-1]) | (sorted_values[1:] != sorted_values[:-1])
    tie = (new.cumsum(0) - 1)[rank]  # [T] the set of equal values of one group that each belongs to
    ties = Groups(tie, int(new.sum()))
    first = segment_count(groups.ids, groups.num).cumsum(0)[groups.ids] - groups.size
    return ties.min(rank.double()).long() - first, ties.size
