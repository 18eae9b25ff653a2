"""Advantages for agents of several turns: credit for the episode and for each turn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.groups import Groups, group_rewards, normalised
from burnish.algorithms.advantages.rewards import place_rewards, token_rewards
from burnish.algorithms.advantages.turns import turns_of
from burnish.algorithms.recurrence import recurrence
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, offsets_from_lengths, segment_count, segment_sum


def gigpo(batch: Batch, omega: float = 1.0, gamma: float = 0.95, normalise: Literal["none", "std"] = "none") -> Tensor:
    """[N] the episode relative to its group plus omega times the turn relative to all turns from the same state.

        A = (R - mean_g)/F + omega (Rs_k - mean_anchor)/F;   Rs_k = sum_{j>=k} gamma^(j-k) r_j over the trajectory's turns

    The ragged columns of the turns say where each begins, what it earned and the state it acted in; a reward that no turn
    earned is the last one's. An anchor is all turns of a group in one state, at any time; a turn alone in its state gets 0 from
    it. F is 1, or the deviation + 1e-6. GiGPO (2505.10978).
    """
    if "turn_state" not in batch.ragged:
        raise UserError(
            "advantage gigpo compares the turns of a group that begin in the same state, and the environment reports none: give every "
            "Turn a state (text, equal where the model knows the same), or use grpo"
        )
    owner, rewards, groups = group_rewards(batch)
    std = "group" if normalise == "std" else "none"
    episode = normalised(rewards, groups, std, eps=1e-6)
    turns = turns_of(batch)
    trajectory = owner[turns.sequence]
    states, num_states = compact_ids(batch.ragged["turn_state"].values)
    anchors, num = compact_ids(groups.ids[trajectory] * num_states + states)
    placed = token_rewards(batch) if "token_rewards" in batch.token else place_rewards(batch)
    earned = segment_sum(placed[turns.where], turns.of_token, turns.num)
    returns = turn_returns(earned, trajectory, gamma)
    step = normalised(returns, Groups(anchors, num), std, eps=1e-6, singleton="zero")
    advantages = episode[trajectory] + omega * step
    return advantages.new_zeros(batch.num_tokens).index_copy_(0, turns.where, advantages[turns.of_token])


def turn_returns(earned: Tensor, trajectory: Tensor, gamma: float) -> Tensor:
    """[K] the discounted return from each turn to the end of its trajectory, whose turns are in order."""
    order = torch.argsort(trajectory, stable=True)
    offsets = offsets_from_lengths(segment_count(trajectory, int(trajectory.max()) + 1))
    return torch.empty_like(earned).index_copy_(0, order, recurrence(earned[order], offsets, gamma))
