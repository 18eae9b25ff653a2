"""Advantages relative to the other samples of the same prompt; one value a sequence [S].

A group is what shares `group_ids`. A trajectory of several sequences counts once in it and all its sequences get its
advantage. Groups whose rewards are all equal get exactly 0: rounding of the mean, divided by a deviation of about eps,
would otherwise be a signal. A group of one has nothing to compare with: mean 0 and deviation 1, so its raw reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.rewards import sequence_rewards
from burnish.algorithms.advantages.written import lengths_in_loss, whitened, written_lengths
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_count, segment_max, segment_mean, segment_min, segment_sum


@dataclass(frozen=True)
class Groups:
    """T values in groups 0..num-1. Every statistic comes spread over the values [T]."""

    ids: Tensor  # [T]
    num: int

    def sum(self, values: Tensor) -> Tensor:
        return segment_sum(values, self.ids, self.num).index_select(0, self.ids)

    def mean(self, values: Tensor) -> Tensor:
        return segment_mean(values, self.ids, self.num).index_select(0, self.ids)

    def max(self, values: Tensor) -> Tensor:
        return segment_max(values, self.ids, self.num).index_select(0, self.ids)

    def min(self, values: Tensor) -> Tensor:
        return segment_min(values, self.ids, self.num).index_select(0, self.ids)

    @property
    def size(self) -> Tensor:
        return segment_count(self.ids, self.num).index_select(0, self.ids)

    def deviation(self, centred: Tensor, ddof: int = 1) -> Tensor:
        """The deviation of values whose mean was taken off, the sample's unless ddof is 0; 0 in a group of one."""
        return (self.sum(centred**2) / (self.size - ddof).clamp(min=1)).sqrt()

    def is_constant(self, values: Tensor) -> Tensor:
        """Whether a group of two or more has equal values only."""
        return (self.max(values) == self.min(values)) & (self.size > 1)

    def others_mean(self, values: Tensor) -> Tensor:
        """The mean of the other values of the group; 0 in a group of one."""
        return (self.sum(values) - values) / (self.size - 1).clamp(min=1)

    def settled(self, advantages: Tensor, rewards: Tensor, alone: Tensor) -> Tensor:
        """The advantages, exactly 0 where a group's rewards are all equal and `alone` in groups of one."""
        advantages = torch.where(self.is_constant(rewards), torch.zeros_like(advantages), advantages)
        return torch.where(self.size == 1, alone, advantages)


def trajectory_groups(batch: Batch) -> tuple[Tensor, Tensor]:
    """[S] the trajectory of each sequence and [T] the group of each trajectory, both numbered from 0.

    Without `trajectory_ids` every sequence is a trajectory of its own.
    """
    groups, _ = compact_ids(batch.sequence["group_ids"])
    if "trajectory_ids" not in batch.sequence:
        return torch.arange(batch.num_sequences, device=groups.device), groups
    owner, num = compact_ids(batch.sequence["trajectory_ids"])
    return owner, groups.new_zeros(num).index_copy(0, owner, groups)


def group_rewards(batch: Batch) -> tuple[Tensor, Tensor, Groups]:
    """[S] the trajectory of each sequence, [T] the reward of each trajectory, and the groups of the trajectories."""
    owner, ids = trajectory_groups(batch)
    rewards = segment_mean(sequence_rewards(batch), owner, ids.numel())
    return owner, rewards, Groups(ids, int(ids.max()) + 1)


def normalised(rewards: Tensor, groups: Groups, std: str, eps: float, singleton: str = "raw", ddof: int = 1) -> Tensor:
    """[T] (r - group mean) / (deviation + eps), with the deviation of the group, of all rewards, or none."""
    centred = rewards - groups.mean(rewards)
    scale = torch.ones_like(rewards)
    if std == "group":
        scale = groups.deviation(centred, ddof) + eps
    elif std == "batch" and float(rewards.max()) > float(rewards.min()):
        scale = scale * (rewards.std(correction=ddof) + eps)
    return groups.settled(centred / scale, rewards, _alone(rewards / (scale if std == "batch" else 1), singleton))


def _alone(rewards: Tensor, singleton: str) -> Tensor:
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
    return normalised(rewards, groups, std, eps, singleton, ddof).index_select(0, owner)


def rloo(batch: Batch, singleton: Literal["raw", "zero"] = "raw") -> Tensor:
    """[S] r_i minus the mean reward of the other samples: an unbiased baseline. RLOO (2402.14740)."""
    owner, rewards, groups = group_rewards(batch)
    advantages = rewards - groups.others_mean(rewards)
    return groups.settled(advantages, rewards, _alone(rewards, singleton)).index_select(0, owner)


def reinforce_plus_plus_baseline(
    batch: Batch, ddof: Literal[0, 1] = 1, singleton: Literal["raw", "zero"] = "raw"
) -> Tensor:
    """[S] r - group mean, whitened over all tokens in the loss. REINFORCE++-baseline (2501.03262)."""
    owner, rewards, groups = group_rewards(batch)
    return whitened(
        normalised(rewards, groups, "none", 0.0, singleton).index_select(0, owner), ddof, lengths_in_loss(batch)
    )


def opo(batch: Batch, singleton: Literal["raw", "zero"] = "raw") -> Tensor:
    """[S] r_i - b, b = sum |o| r / sum |o| over the group: the baseline of least variance on-policy. OPO (2505.23585)."""
    owner, rewards, groups = group_rewards(batch)
    lengths = segment_sum(written_lengths(batch), owner, rewards.numel())
    baseline = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    return groups.settled(rewards - baseline, rewards, _alone(rewards, singleton)).index_select(0, owner)


def gpg(batch: Batch, normalise: Literal["none", "std"] = "none", eps: float = 1e-6) -> Tensor:
    """[S] alpha (r - group mean), optionally over the group's deviation; alpha = N / (N - M). GPG (2504.02546).

    M of the N samples are in groups of equal rewards; alpha undoes how much they shrink the mean gradient.
    """
    owner, rewards, groups = group_rewards(batch)
    flat = int(groups.is_constant(rewards).sum())
    alpha = rewards.numel() / (rewards.numel() - flat) if flat < rewards.numel() else 1.0
    return alpha * normalised(rewards, groups, "group" if normalise == "std" else "none", eps).index_select(0, owner)


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
