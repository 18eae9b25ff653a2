"""Advantages relative to the other samples of the same prompt; one value a sequence [S].

A group is what shares `group_ids`. A trajectory of several sequences counts once in it and all its sequences get its
advantage. Groups whose rewards are all equal get exactly 0: rounding of the mean, divided by a deviation of about eps,
would otherwise be a signal. A group of one has nothing to compare with: mean 0 and deviation 1, so its raw reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import (
    Groups,
    action_lengths,
    loss_lengths,
    sequence_rewards,
    trajectory_groups,
    whitened,
)
from burnish.config.errors import UserError, did_you_mean
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_count, segment_mean, segment_sum


def group_rewards(batch: Batch) -> tuple[Tensor, Tensor, Groups]:
    """[S] the trajectory of each sequence, [T] the reward of each trajectory, and the groups of the trajectories."""
    owner, ids = trajectory_groups(batch)
    rewards = segment_mean(sequence_rewards(batch), owner, ids.numel())
    return owner, rewards, Groups(ids, int(ids.max()) + 1)


def group_normalised(
    rewards: Tensor, groups: Groups, std: str, eps: float, singleton: str = "raw", ddof: int = 1
) -> Tensor:
    """[T] (r - group mean) / (deviation + eps), with the deviation of the group, of all rewards, or none."""
    centred = rewards - groups.mean(rewards)
    scale = torch.ones_like(rewards)
    if std == "group":
        scale = groups.deviation(centred, ddof) + eps
    elif std == "batch" and float(rewards.max()) > float(rewards.min()):
        scale = scale * (rewards.std(correction=ddof) + eps)
    return groups.settled(
        centred / scale, rewards, _singleton_advantages(rewards / (scale if std == "batch" else 1), singleton)
    )


def _singleton_advantages(rewards: Tensor, singleton: str) -> Tensor:
    return rewards if singleton == "raw" else torch.zeros_like(rewards)


def grpo(
    batch: Batch,
    std: Literal["group", "none", "batch"] = "group",
    eps: float = 1e-6,
    singleton: Literal["raw", "zero"] = "raw",
    ddof: Literal[0, 1] = 1,
) -> Tensor:
    """[S] (r - group mean) / (deviation + eps); exactly 0 where a group's rewards are all equal.

    DeepSeekMath (2402.03300). `std="none"` is Dr.GRPO (2503.20783), `std="batch"` divides by the deviation of all rewards.
    """
    owner, rewards, groups = group_rewards(batch)
    return group_normalised(rewards, groups, std, eps, singleton, ddof).index_select(0, owner)


def rloo(batch: Batch, singleton: Literal["raw", "zero"] = "raw") -> Tensor:
    """[S] r_i minus the mean reward of the other samples: an unbiased baseline. RLOO (2402.14740)."""
    owner, rewards, groups = group_rewards(batch)
    advantages = rewards - groups.others_mean(rewards)
    return groups.settled(advantages, rewards, _singleton_advantages(rewards, singleton)).index_select(0, owner)


def reinforce_plus_plus_baseline(
    batch: Batch, ddof: Literal[0, 1] = 1, singleton: Literal["raw", "zero"] = "raw"
) -> Tensor:
    """[S] r - group mean, whitened over all tokens in the loss. REINFORCE++-baseline (2501.03262)."""
    owner, rewards, groups = group_rewards(batch)
    return whitened(
        group_normalised(rewards, groups, "none", 0.0, singleton).index_select(0, owner), ddof, loss_lengths(batch)
    )


def opo(batch: Batch, singleton: Literal["raw", "zero"] = "raw") -> Tensor:
    """[S] r_i - b, b = sum |o| r / sum |o| over the group: the baseline of least variance on-policy. OPO (2505.23585)."""
    owner, rewards, groups = group_rewards(batch)
    lengths = segment_sum(action_lengths(batch), owner, rewards.numel())
    baseline = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    return groups.settled(rewards - baseline, rewards, _singleton_advantages(rewards, singleton)).index_select(0, owner)


def gpg(batch: Batch, normalise: Literal["none", "std"] = "none", eps: float = 1e-6) -> Tensor:
    """[S] alpha (r - group mean), optionally over the group's deviation; alpha = N / (N - M). GPG (2504.02546).

    M of the N samples are in groups of equal rewards; alpha undoes how much they shrink the mean gradient.
    """
    owner, rewards, groups = group_rewards(batch)
    flat = int(groups.is_constant(rewards).sum())
    alpha = rewards.numel() / (rewards.numel() - flat) if flat < rewards.numel() else 1.0
    return alpha * group_normalised(rewards, groups, "group" if normalise == "std" else "none", eps).index_select(
        0, owner
    )


def grpo_passk(batch: Batch, std: Literal["group", "none"] = "group", eps: float = 1e-6) -> Tensor:
    """[S] best minus second best, over deviation + eps, for the single best sample of a group; 0 for all others.

    Optimises the best of the group rather than its mean; a tie for the best gives 0. A group of one is refused.
    """
    owner, rewards, groups = group_rewards(batch)
    if bool((groups.size == 1).any()):
        raise UserError("advantage grpo_passk compares the two best samples of a prompt, but a prompt has only one")
    best = rewards == groups.max(rewards)
    second = groups.max(torch.where(best, -torch.inf, rewards))
    unique = best & (groups.sum(best.long()) == 1)
    scale = groups.deviation(rewards - groups.mean(rewards)) + eps if std == "group" else torch.ones_like(rewards)
    return torch.where(unique, (rewards - second) / scale, torch.zeros_like(rewards)).index_select(0, owner)


def reinforce_rej(batch: Batch) -> Tensor:
    """[S] the reward itself, but 0 in groups of equal rewards. Reinforce-Rej of Minimal-RL (2504.11343)."""
    owner, rewards, groups = group_rewards(batch)
    return groups.settled(rewards, rewards, rewards).index_select(0, owner)


# --- Advantages of several rewards, each normalised on its own before they are added.

EQUAL: Mapping[str, float] = MappingProxyType({})
PART_PREFIX = "part/"


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
    parts = sorted(name.removeprefix(PART_PREFIX) for name in batch.sequence if name.startswith(PART_PREFIX))
    for name in weights:
        if name not in parts and weights[name] != 0:
            raise UserError(
                f"advantage gdpo has a weight for {name!r}, which is no reward part{did_you_mean(name, parts)}"
            )
    parts = [name for name in parts if "/" not in name or name in weights]
    if not parts:
        raise UserError("advantage gdpo adds up reward parts, but no reward of this batch has parts")
    owner, ids = trajectory_groups(batch)
    total = torch.zeros(ids.numel(), dtype=batch.sequence[PART_PREFIX + parts[0]].dtype, device=ids.device)
    for name in parts:
        rewards = segment_mean(batch.sequence[PART_PREFIX + name], owner, ids.numel())
        total += weights.get(name, 1.0) * _normalised_where_present(rewards, ids, std, eps)
    return whitened(total[owner], ddof, loss_lengths(batch))


def _normalised_where_present(rewards: Tensor, ids: Tensor, std: str, eps: float) -> Tensor:
    """[T] the normalised rewards of the trajectories that have one, among themselves; 0 for the others."""
    there = (~rewards.isnan()).nonzero().squeeze(1)
    groups = Groups(*compact_ids(ids[there]))
    return torch.zeros_like(rewards).index_copy(0, there, group_normalised(rewards[there], groups, std, eps))


# --- Baselines that come from preference optimisation: the soft mean of a group, and the chance to win in it.


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
    below, equal = _num_below_and_equal(rewards, groups)
    wins = below + (equal - 1).to(rewards.dtype) / 2
    chance = wins / (groups.size - 1).clamp(min=1)
    return torch.where(groups.size == 1, 0.0, chance - 0.5)[owner]


def _num_below_and_equal(values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
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
