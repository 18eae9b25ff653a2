"""Advantages relative to a group whose baseline or scale is not the group's mean and deviation: one value per sequence [S].

Groups, trajectories and groups of one are those of `group_relative.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.group_relative import group_rewards
from burnish.config.errors import UserError
from burnish.core.batch import Batch


def max_rl(batch: Batch, *, singleton: Literal["raw", "zero"]) -> Tensor:
    """[S] A = (r - mean_g) / mean_g; 0 in a group of mean 0. Maximum-likelihood RL (2602.02710), as in prime-rl and SkyRL.

    log p = -sum_k (1-p)^k / k, of which the expected reward is the first term. For 0/1 rewards and groups of G the expected gradient
    is that of the series cut at k = G - 1, so prompts that are rarely solved have a weight of about 1/p. Rewards must not be negative.
    """
    trajectory_ids, rewards, groups = group_rewards(batch)
    if bool((rewards < 0).any()):
        raise UserError(
            f"advantage max_rl divides by the mean reward of a prompt, and a sample has the reward {float(rewards.min()):g}: use rewards "
            "of 0 or more (0 for a wrong answer, 1 for a right one), without shapers or KL that make them negative"
        )
    mean = groups.mean(rewards)
    advantages = torch.where(mean > 0, (rewards - mean) / torch.where(mean > 0, mean, 1.0), 0.0)
    singletons = rewards if singleton == "raw" else torch.zeros_like(rewards)
    return groups.with_degenerate(advantages, rewards, singletons).index_select(0, trajectory_ids)


def asymre(batch: Batch, *, delta: float) -> Tensor:
    """[S] A = r - (mean_g + delta), delta < 0; a group of one has A = r. AsymRE, as in Trinity-RFT.

    REINFORCE on stale samples is stable only if the baseline is below the mean reward of the policy that sampled. Unlike under other
    baselines, a group of equal rewards has the advantage -delta.
    """
    trajectory_ids, rewards, groups = group_rewards(batch)
    advantages = torch.where(groups.size == 1, rewards, rewards - (groups.mean(rewards) + delta))
    return advantages.index_select(0, trajectory_ids)


def opmd(batch: Batch, *, baseline: Literal["mean", "logavgexp"], tau: float) -> Tensor:
    """[S] A = r - b, with b = mean_g, or b = tau (logsumexp_g(r / tau) - log G); a group of one has b = 0. OPMD, as in Trinity-RFT.

    The loss `opmd` divides by 1 + tau. logavgexp is `softmean` with beta = 1 / tau, apart from groups of one.
    """
    trajectory_ids, rewards, groups = group_rewards(batch)
    if baseline == "mean":
        value = groups.mean(rewards)
    else:
        value = tau * groups.log_mean_exp(rewards / tau)
    return groups.with_degenerate(rewards - value, rewards, rewards).index_select(0, trajectory_ids)
