"""Advantages with one baseline for each role: one value per sequence [S].

A batch of self-play mixes roles, and of self-made tasks also types of tasks. Their rewards have different scales, so one baseline for all
of them would favour the role whose rewards are high. The sequence column `role_ids` has equal numbers for equal roles; environments name
the role of each trajectory, and the copies of a role (`solve:0`, `solve:1`) count as one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import Groups, sequence_rewards, trajectory_groups
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_mean
from burnish.core.trajectory import ROLE_COLUMN


def role_rewards(batch: Batch, user: str) -> tuple[Tensor, Tensor, Groups]:
    """[S] the trajectory of each sequence, [T] the reward of each trajectory, and the trajectories of each role as groups.

    A batch without roles is an error that names `user`, the option that needs them.
    """
    roles = batch.sequence.get(ROLE_COLUMN)
    if roles is None:
        raise UserError(
            f"{user} needs the role of every sample, but the environment has no roles: use one with several roles, such as absolute_zero or "
            "a game of two players, or another advantage"
        )
    trajectory_ids, groups = trajectory_groups(batch)
    rewards = segment_mean(sequence_rewards(batch), trajectory_ids, groups.numel())
    ids, num = compact_ids(roles)
    return trajectory_ids, rewards, Groups(ids.new_zeros(groups.numel()).index_copy(0, trajectory_ids, ids), num)


def trr_plus_plus(batch: Batch, *, eps: float, ddof: Literal[0, 1]) -> Tensor:
    """[S] A = (r - mean_k) / (std_k + eps), over all samples of the batch with the same role k.

    A role with one sample, or with equal rewards, gets exactly 0. Task-relative REINFORCE++ of Absolute Zero (2505.03335), whose roles are
    three types of tasks x proposing and solving: six baselines.
    """
    trajectory_ids, rewards, roles = role_rewards(batch, "trr_plus_plus")
    centred = rewards - roles.mean(rewards)
    advantages = centred / (roles.deviation(centred, ddof) + eps)
    return roles.with_degenerate(advantages, rewards, torch.zeros_like(rewards)).index_select(0, trajectory_ids)
