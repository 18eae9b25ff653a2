"""Where rewards stand: one a sequence, or placed on the tokens the model wrote."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.advantages.turns import with_turn_rewards
from burnish.algorithms.advantages.written import Written, written
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum


def sequence_rewards(batch: Batch) -> Tensor:
    """[S] total reward of each sequence: the outcome itself where rewards do not stand on tokens."""
    if "token_rewards" not in batch.token:
        return batch.sequence["reward"]
    return contiguous_sum(token_rewards(batch), batch.offsets)


def token_rewards(batch: Batch) -> Tensor:
    """[N] the `token_rewards` column, refused if a token the model did not write has a reward.

    Outcome estimators would count such a reward and token recursions would not; what a tool's answer earned belongs on
    the last written token before it.
    """
    rewards = batch.token["token_rewards"]
    stray = (rewards != 0).logical_and_(~batch.action_mask)
    if bool(stray.any()):
        at = int(stray.nonzero()[0])
        sequence = int(torch.searchsorted(batch.offsets, at, right=True)) - 1
        raise ValueError(
            f"token {at - int(batch.offsets[sequence])} of sequence {sequence} has a reward of {float(rewards[at])}, but "
            "the model did not write it; place the reward on the last token it wrote before"
        )
    return rewards


def rewards_at(batch: Batch, tokens: Written) -> Tensor:
    """[M] the reward at each written token; an outcome stands on the last one of its sequence."""
    if "token_rewards" in batch.token:
        return tokens.take(token_rewards(batch))
    outcome = batch.sequence["reward"]
    rewards = outcome.new_zeros(int(tokens.offsets[-1]))
    rewards[tokens.last] = outcome
    return rewards


def place_rewards(batch: Batch) -> Tensor:
    """[N] outcome rewards: each sequence's on the last token the model wrote in it, but what a turn earned on the turn's last."""
    tokens = written(batch)
    last = tokens.last if tokens.where is None else tokens.where[tokens.last]
    rewards = batch.sequence["reward"].new_zeros(batch.num_tokens)
    rewards[last] = batch.sequence["reward"]
    return with_turn_rewards(batch, rewards, last) if "turn_reward" in batch.ragged else rewards
