"""Advantages of games and tasks with several roles, which the same policy plays: one value per sequence [S].

A role is a player of an environment (`X` and `O`, proposer and solver). Its samples are compared with its own, because one role may be
better off than another whatever the policy does. The sequence columns `role_ids` and `episode_ids` come from `core/trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.group_relative import group_normalised, group_rewards
from burnish.algorithms.batch_columns import Groups, first_index, is_replayed
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids
from burnish.core.trajectory import role_key

NO_ROLE = role_key("")
"""The key of samples without a role."""


@dataclass(frozen=True)
class AdvantagesAndBaselines:
    """Advantages, and the baselines that the next batch begins with."""

    advantages: Tensor  # [S]
    baselines: dict[int, float]
    """By `role_key` of the role's name."""


def rae(batch: Batch, baselines: Mapping[int, float] | None = None, *, alpha: float) -> AdvantagesAndBaselines:
    """[S] A_i = r_i - b_role, and then b_role <- alpha b_role + (1 - alpha) r_i. RAE of SPIRAL (2506.24119).

    In a zero-sum game the mean over both roles is about 0 whatever the policy does, and one role may win more by the rules. Trajectories
    count one after another in the order of sampling, which `trajectory_ids` gives, so the advantage does not depend on the order of the
    rows. `baselines` are those after the batch before; a role without one begins at 0. A replayed trajectory does not move its baseline.
    """
    trajectory_ids, rewards, _ = group_rewards(batch)
    first = first_index(trajectory_ids, rewards.numel())
    roles = batch.sequence["role_ids"][first].tolist() if "role_ids" in batch.sequence else [NO_ROLE] * len(first)
    current, found = dict(baselines or {}), list[float]()
    for role, reward, is_old in zip(roles, rewards.tolist(), is_replayed(batch)[first].tolist(), strict=True):
        baseline = current.get(role, 0.0)
        found.append(reward - baseline)
        if not is_old:
            current[role] = alpha * baseline + (1 - alpha) * reward
    advantages = torch.tensor(found, dtype=rewards.dtype, device=rewards.device)
    return AdvantagesAndBaselines(advantages[trajectory_ids], current)


def hierarchical_grpo(batch: Batch, *, episode_roles: Sequence[str]) -> Tensor:
    """[S] A = r - mean of the peers, which have the same role and, in `episode_roles`, the same episode; else the same group. prime-rl.

    An episode is one proposal with its attempts, and a group the episodes of one source task. So attempts are compared with attempts at the
    same problem, and proposals with proposals from the same source. A sample without another peer gets 0.
    """
    if "episode_ids" not in batch.sequence or "role_ids" not in batch.sequence:
        raise UserError(
            "advantage hierarchical_grpo compares samples of the same role and episode, and this environment has no roles: use grpo"
        )
    trajectory_ids, rewards, groups = group_rewards(batch)
    first = first_index(trajectory_ids, rewards.numel())
    keys = torch.tensor([role_key(name) for name in episode_roles], device=first.device)
    is_within = torch.isin(batch.sequence["role_ids"][first], keys)
    episodes, num = compact_ids(batch.sequence["episode_ids"][first])
    peers = Groups(*compact_ids(groups.ids * (num + 1) + torch.where(is_within, episodes, num)))
    return group_normalised(rewards, peers, "none", 0.0, "zero")[trajectory_ids]


def trr_plus_plus(batch: Batch, *, eps: float, ddof: Literal[0, 1]) -> Tensor:
    """[S] A = (r - mean_k) / (std_k + eps), over all samples of the batch with the same role k.

    A role with one sample, or with equal rewards, gets exactly 0. Task-relative REINFORCE++ of Absolute Zero (2505.03335), whose roles are
    three types of tasks x proposing and solving: six baselines.
    """
    if "role_ids" not in batch.sequence:
        raise UserError(
            "trr_plus_plus needs the role of every sample, but the environment has no roles: use one with several roles, such as absolute_zero or "
            "a game of two players, or another advantage"
        )
    trajectory_ids, rewards, _ = group_rewards(batch)
    roles = Groups(*compact_ids(batch.sequence["role_ids"][first_index(trajectory_ids, rewards.numel())]))
    centred = rewards - roles.mean(rewards)
    advantages = centred / (roles.deviation(centred, ddof) + eps)
    return roles.with_degenerate(advantages, rewards, torch.zeros_like(rewards))[trajectory_ids]
