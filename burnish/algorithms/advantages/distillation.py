"""Advantage `distillation`: every token is judged by a teacher, on what the policy itself wrote."""

from __future__ import annotations

from torch import Tensor

from burnish.algorithms.advantages.groups import Groups, normalised, trajectory_groups
from burnish.algorithms.advantages.rewards import place_rewards, token_rewards
from burnish.core.batch import Batch
from burnish.core.segments import broadcast, segment_mean


def distillation(batch: Batch, outcome: float = 0.0) -> Tensor:
    """[N] what the KL to the teacher takes off a token's reward, and nothing of any later token's; plus `outcome` times the
    sample's reward less its group's mean.

    With the estimator k1 and coefficient 1 this is log q - log p of the token: the policy gradient of the reverse KL of each
    next token, on the policy's own prefixes. GKD (2306.13649), MiniLLM (2306.08543).
    """
    advantages = batch.sequence["reward"].new_zeros(batch.num_tokens)
    if "token_rewards" in batch.token:
        advantages = token_rewards(batch) - place_rewards(batch)
    if outcome == 0:
        return advantages
    owner, ids = trajectory_groups(batch)
    rewards = segment_mean(batch.sequence["reward"], owner, ids.numel())
    relative = normalised(rewards, Groups(ids, int(ids.max()) + 1), "none", 0.0, "zero").index_select(0, owner)
    return advantages + outcome * broadcast(relative, batch.sequence_ids) * batch.action_mask
