"""Advantages for agents whose steps are sequences of their own: credit for the episode and for each step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.groups import Groups, group_rewards, normalised
from burnish.algorithms.recurrence import recurrence
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, offsets_from_lengths, segment_count


def gigpo(batch: Batch, omega: float = 1.0, gamma: float = 0.95, normalise: Literal["none", "std"] = "none") -> Tensor:
    """[S] the episode relative to its group plus omega times the step relative to all steps from the same state.

        A = (R - mean_g)/F + omega (Rs_k - mean_anchor)/F;   Rs_k = sum_{j>=k} gamma^(j-k) r_j over the trajectory's steps

    Every sequence is one step of its trajectory: `step` [S] its number, `step_reward` [S] what it earned, `state_ids` [S]
    the state it acted in. An anchor is all steps of a group in one state, at any time; a step alone in its state gets 0
    from it. F is 1, or the deviation + 1e-6. GiGPO (2505.10978).
    """
    owner, rewards, groups = group_rewards(batch)
    std = "group" if normalise == "std" else "none"
    episode = normalised(rewards, groups, std, eps=1e-6)[owner]
    states, num_states = compact_ids(batch.sequence["state_ids"])
    anchors, num = compact_ids(groups.ids[owner] * num_states + states)
    step = normalised(step_returns(batch, owner, gamma), Groups(anchors, num), std, eps=1e-6, singleton="zero")
    return episode + omega * step


def step_returns(batch: Batch, owner: Tensor, gamma: float) -> Tensor:
    """[S] the discounted return from each step to the end of its trajectory, whatever the order of the sequences."""
    order = torch.argsort(batch.sequence["step"], stable=True)
    order = order[torch.argsort(owner[order], stable=True)]
    offsets = offsets_from_lengths(segment_count(owner, int(owner.max()) + 1))
    rewards = batch.sequence["step_reward"]
    return torch.empty_like(rewards).index_copy(0, order, recurrence(rewards[order], offsets, gamma))
