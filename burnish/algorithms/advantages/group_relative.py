"""Advantages relative to the other samples of the same prompt: one value per sequence [S].

A group is the sequences with the same `group_ids`. A trajectory of several sequences counts once in its group, and all its
sequences get its advantage. A group of equal rewards gets exactly 0; otherwise rounding of the mean, divided by a
deviation of about eps, would become a signal. A group of one has mean 0 and deviation 1, so its advantage is its reward.
"""

from __future__ import annotations

from collections.abc import Mapping
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

PART_PREFIX = "part/"
"""Sequence columns of reward parts start with this."""


def group_rewards(batch: Batch) -> tuple[Tensor, Tensor, Groups]:
    """[S] the trajectory of each sequence, [T] the reward of each trajectory, and the groups of the trajectories."""
    trajectory_ids, ids = trajectory_groups(batch)
    rewards = segment_mean(sequence_rewards(batch), trajectory_ids, ids.numel())
    return trajectory_ids, rewards, Groups(ids, int(ids.max()) + 1)


def group_normalised(
    rewards: Tensor, groups: Groups, std: str, eps: float, singleton: str = "raw", ddof: int = 1
) -> Tensor:
    """[T] (r - mean_g) / (std + eps), with `std` of the group, of the whole batch, or 1."""
    centred = rewards - groups.mean(rewards)
    scale = torch.ones_like(rewards)
    if std == "group":
        scale = groups.deviation(centred, ddof) + eps
    elif std == "batch" and float(rewards.max()) > float(rewards.min()):
        scale = scale * (rewards.std(correction=ddof) + eps)
    return groups.with_degenerate(
        centred / scale, rewards, _singleton_advantages(rewards / (scale if std == "batch" else 1), singleton)
    )


def _singleton_advantages(rewards: Tensor, singleton: str) -> Tensor:
    return rewards if singleton == "raw" else torch.zeros_like(rewards)


def grpo(
    batch: Batch,
    *,
    std: Literal["group", "none", "batch"],
    eps: float,
    singleton: Literal["raw", "zero"],
    ddof: Literal[0, 1],
) -> Tensor:
    """[S] A = (r - mean_g) / (std_g + eps); exactly 0 in a group of equal rewards. GRPO, DeepSeekMath (2402.03300).

    `std` none divides by nothing, as Dr.GRPO (2503.20783) does. `std` batch divides by the deviation of all rewards.
    """
    trajectory_ids, rewards, groups = group_rewards(batch)
    return group_normalised(rewards, groups, std, eps, singleton, ddof).index_select(0, trajectory_ids)


def rloo(batch: Batch, *, singleton: Literal["raw", "zero"]) -> Tensor:
    """[S] A_i = r_i - mean_{j != i} r_j, an unbiased leave-one-out baseline. RLOO (2402.14740)."""
    trajectory_ids, rewards, groups = group_rewards(batch)
    advantages = rewards - groups.others_mean(rewards)
    return groups.with_degenerate(advantages, rewards, _singleton_advantages(rewards, singleton)).index_select(
        0, trajectory_ids
    )


def reinforce_plus_plus_baseline(batch: Batch, *, ddof: Literal[0, 1], singleton: Literal["raw", "zero"]) -> Tensor:
    """[S] A = whiten(r - mean_g), whitened over all tokens in the loss. REINFORCE++-baseline (2501.03262)."""
    trajectory_ids, rewards, groups = group_rewards(batch)
    return whitened(
        group_normalised(rewards, groups, "none", 0.0, singleton).index_select(0, trajectory_ids),
        ddof,
        loss_lengths(batch),
    )


def opo(batch: Batch, *, singleton: Literal["raw", "zero"]) -> Tensor:
    """[S] A_i = r_i - sum_g |o_j| r_j / sum_g |o_j|: the on-policy baseline of least variance. OPO (2505.23585)."""
    trajectory_ids, rewards, groups = group_rewards(batch)
    lengths = segment_sum(action_lengths(batch), trajectory_ids, rewards.numel())
    baseline = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    return groups.with_degenerate(rewards - baseline, rewards, _singleton_advantages(rewards, singleton)).index_select(
        0, trajectory_ids
    )


def gpg(batch: Batch, *, normalise: Literal["none", "std"], eps: float) -> Tensor:
    """[S] A = N / (N - M) (r - mean_g), optionally divided by std_g + eps. GPG (2504.02546).

    M of the N samples are in groups of equal rewards. The factor undoes how much these shrink the mean gradient. A group of one has
    the gradient of its raw reward, so it counts in N and not in M.
    """
    trajectory_ids, rewards, groups = group_rewards(batch)
    num_constant = int(groups.is_constant(rewards).sum())
    alpha = rewards.numel() / (rewards.numel() - num_constant) if num_constant < rewards.numel() else 1.0
    return alpha * group_normalised(rewards, groups, "group" if normalise == "std" else "none", eps).index_select(
        0, trajectory_ids
    )


def grpo_passk(batch: Batch, *, std: Literal["group", "none"], eps: float) -> Tensor:
    """[S] A = (r_best - r_second) / (std_g + eps) for the unique best sample of a group, 0 for all others.

    It optimises the best sample of a group instead of the mean. A tie for the best gives 0. A group of one is an error.
    """
    trajectory_ids, rewards, groups = group_rewards(batch)
    if bool((groups.size == 1).any()):
        raise UserError("advantage grpo_passk compares the two best samples of a prompt, but a prompt has only one")
    best = rewards == groups.max(rewards)
    second = groups.max(torch.where(best, -torch.inf, rewards))
    is_unique_best = best & (groups.sum(best.long()) == 1)
    scale = groups.deviation(rewards - groups.mean(rewards)) + eps if std == "group" else torch.ones_like(rewards)
    return torch.where(is_unique_best, (rewards - second) / scale, torch.zeros_like(rewards)).index_select(
        0, trajectory_ids
    )


def reinforce_rej(batch: Batch) -> Tensor:
    """[S] A = r, but 0 in a group of equal rewards. Reinforce-Rej, Minimal-RL (2504.11343)."""
    trajectory_ids, rewards, groups = group_rewards(batch)
    return groups.with_degenerate(rewards, rewards, rewards).index_select(0, trajectory_ids)


# --- Several rewards


def gdpo(
    batch: Batch, *, std: Literal["group", "none"], eps: float, weights: Mapping[str, float], ddof: Literal[0, 1]
) -> Tensor:
    """[S] A = whiten(sum_k weight_k (r_k - mean_g r_k) / (std_g r_k + eps)) over reward parts k. GDPO (2601.05242).

    Normalising the sum instead would let a part with a wide range dominate the others. Parts are the sequence columns
    `part/<name>`; a part without a weight has weight 1. An extra value that a reward reports (`part/<name>/<key>`)
    counts only if it has a weight. A nan (the sample has no such part) adds 0 and is left out of the statistics.
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
    trajectory_ids, ids = trajectory_groups(batch)
    total = torch.zeros(ids.numel(), dtype=batch.sequence[PART_PREFIX + parts[0]].dtype, device=ids.device)
    for name in parts:
        rewards = segment_mean(batch.sequence[PART_PREFIX + name], trajectory_ids, ids.numel())
        total += weights.get(name, 1.0) * _normalised_where_present(rewards, ids, std, eps)
    return whitened(total[trajectory_ids], ddof, loss_lengths(batch))


def _normalised_where_present(rewards: Tensor, ids: Tensor, std: str, eps: float) -> Tensor:
    """[T] rewards normalised among the trajectories that have one; 0 for the others."""
    present = (~rewards.isnan()).nonzero().squeeze(1)
    groups = Groups(*compact_ids(ids[present]))
    return torch.zeros_like(rewards).index_copy(0, present, group_normalised(rewards[present], groups, std, eps))


# --- Baselines from preference optimisation


def softmean(batch: Batch, *, beta: float) -> Tensor:
    """[S] A = r - (1/beta) log mean_g exp(beta r): the reward above the group's soft mean.

    With beta = 1/tau it is r - tau log Z of Kimi k1.5 (2501.12599); with beta = eta it is the reward form of SPPO (2405.00675).
    """
    trajectory_ids, rewards, groups = group_rewards(batch)
    soft = groups.log_mean_exp(beta * rewards) / beta
    return groups.with_degenerate(rewards - soft, rewards, torch.zeros_like(rewards))[trajectory_ids]


def win_rate(batch: Batch) -> Tensor:
    """[S] A_i = P_i - 1/2, with P_i the mean probability of beating another sample of the group. SPPO (2405.00675).

    P is the sequence column `win_probability` if a preference model gave one. Otherwise rewards are compared, and a tie is
    half a win.
    """
    if "win_probability" in batch.sequence:
        return batch.sequence["win_probability"] - 0.5
    trajectory_ids, rewards, groups = group_rewards(batch)
    below, equal = _num_below_and_equal(rewards, groups)
    wins = below + (equal - 1).to(rewards.dtype) / 2
    chance = wins / (groups.size - 1).clamp(min=1)
    return torch.where(groups.size == 1, 0.0, chance - 0.5)[trajectory_ids]


def _num_below_and_equal(values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """[T] how many values of the same group are below each value, and how many equal it (itself included)."""
    order = torch.argsort(values, stable=True)
    order = order[torch.argsort(groups.ids[order], stable=True)]
    rank = torch.empty_like(order).index_copy(0, order, torch.arange(order.numel(), device=order.device))
    sorted_ids, sorted_values = groups.ids[order], values[order]
    new = torch.ones_like(sorted_ids, dtype=torch.bool)
    new[1:] = (sorted_ids[1:] != sorted_ids[:-1]) | (sorted_values[1:] != sorted_values[:-1])
    tie = (new.cumsum(0) - 1)[rank]  # [T] the set of equal values of one group that this value belongs to
    ties = Groups(tie, int(new.sum()))
    first = segment_count(groups.ids, groups.num).cumsum(0)[groups.ids] - groups.size
    return ties.min(rank.double()).long() - first, ties.size
