"""Slot `advantage`: rewards to advantages. Pure functions of a batch; no gradient.

Each takes the batch (with `group_ids`, the masks and `token_rewards` [N], rewards placed on tokens after any KL term)
and returns either one value a sequence [S] or one a token [N]. Group statistics count every trajectory once and see
all samples of the group, whatever the loss mask says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_count, segment_max, segment_mean, segment_min, segment_sum


def sequence_rewards(batch: Batch) -> Tensor:
    """[S] total reward of each sequence."""
    return segment_sum(batch.token["token_rewards"], batch.sequence_ids, batch.num_sequences)


def place_rewards(batch: Batch) -> Tensor:
    """[N] outcome rewards: each sequence's on the last token the model wrote in it."""
    n = batch.num_tokens
    index = torch.where(batch.action_mask, torch.arange(n, device=batch.tokens.device), -1)
    last = segment_max(index.double(), batch.sequence_ids, batch.num_sequences).long()
    if bool((last < 0).any()):
        raise ValueError(
            f"sequence {int((last < 0).nonzero()[0])} has no token the model wrote, so its reward has no place"
        )
    rewards = torch.zeros(n, dtype=batch.sequence["reward"].dtype, device=batch.tokens.device)
    rewards[last] = batch.sequence["reward"]
    return rewards


def grpo(
    batch: Batch,
    std: Literal["group", "none", "batch"] = "group",
    eps: float = 1e-6,
    singleton: Literal["raw", "zero"] = "raw",
) -> Tensor:
    """[S] (r - group mean) / (deviation + eps), sample deviation; exactly 0 where a group's rewards are all equal.

    DeepSeekMath (2402.03300). `std="none"` is Dr.GRPO (2503.20783), `std="batch"` divides by the deviation of all rewards.
    """
    owner, groups = trajectory_groups(batch)  # [S] sequence -> trajectory, [T] trajectory -> group
    rewards = segment_mean(sequence_rewards(batch), owner, groups.numel())  # [T]
    num = int(groups.max()) + 1
    count = segment_count(groups, num)
    centred = rewards - segment_mean(rewards, groups, num)[groups]
    scale = torch.ones_like(rewards)
    if std == "group":
        variance = segment_sum(centred**2, groups, num) / (count - 1).clamp(min=1)
        scale = (variance.sqrt() + eps)[groups]
    elif std == "batch" and float(rewards.max()) > float(rewards.min()):
        scale = scale * (rewards.std() + eps)
    constant = segment_max(rewards, groups, num) == segment_min(rewards, groups, num)
    advantages = torch.where(constant[groups], torch.zeros_like(centred), centred / scale)
    raw = rewards / (scale if std == "batch" else 1) if singleton == "raw" else torch.zeros_like(rewards)
    return torch.where((count == 1)[groups], raw, advantages)[owner]


def trajectory_groups(batch: Batch) -> tuple[Tensor, Tensor]:
    """[S] the trajectory of each sequence and [T] the group of each trajectory, both numbered from 0.

    Without `trajectory_ids` every sequence is a trajectory of its own.
    """
    groups, _ = compact_ids(batch.sequence["group_ids"])
    if "trajectory_ids" not in batch.sequence:
        return torch.arange(batch.num_sequences, device=groups.device), groups
    owner, num = compact_ids(batch.sequence["trajectory_ids"])
    return owner, groups.new_zeros(num).index_copy(0, owner, groups)


def reinforce(batch: Batch, gamma: float = 1.0, baseline: float = 0.0) -> Tensor:
    """[N] discounted return-to-go minus a constant; tokens the model did not write take no discount step (Williams, 1992)."""
    mask = batch.action_mask
    returns = discounted_returns(batch.token["token_rewards"], mask, batch.sequence_ids, batch.num_sequences, gamma)
    return torch.where(mask, returns - baseline, torch.zeros_like(returns))


def discounted_returns(rewards: Tensor, mask: Tensor, ids: Tensor, num: int, gamma: float) -> Tensor:
    """[N] sum of later rewards in the same sequence, discounted per written token, by a segmented doubling scan.

    Works on written tokens only (others hold 0). log2(longest) vectorised passes instead of a loop over time.
    """
    where = mask.nonzero().squeeze(1)
    total, owner = rewards[where].clone(), ids[where]
    longest = int(segment_count(owner, num).max()) if where.numel() else 0
    step = 1
    while step < longest:
        # total[t] covers the next `step` rewards; adding gamma^step * total[t + step] doubles that.
        ahead = torch.zeros_like(total)
        ahead[:-step] = torch.where(owner[step:] == owner[:-step], total[step:], torch.zeros_like(total[step:]))
        total = total + gamma**step * ahead
        step *= 2
    return torch.zeros_like(rewards).index_copy(0, where, total)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {"grpo": grpo, "reinforce": reinforce}
