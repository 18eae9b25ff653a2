"""Advantages from each sample's own rewards: return-to-go minus a baseline that needs no siblings.

With outcome rewards and no discount the return is the same at every token, so these stay one value a sequence [S].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages.rewards import rewards_at, sequence_rewards
from burnish.algorithms.advantages.written import (
    Written,
    lengths_in_loss,
    whitened,
    whitened_tokens,
    written,
    written_of,
)
from burnish.algorithms.recurrence import recurrence
from burnish.core.batch import Batch


def discounted_returns(rewards: Tensor, mask: Tensor, offsets: Tensor, gamma: float) -> Tensor:
    """[N] sum of this and later rewards in the same sequence, discounted per written token; 0 at other tokens."""
    tokens = written_of(mask, offsets)
    return tokens.put(recurrence(tokens.take(rewards), tokens.offsets, gamma))


def returns_to_go(batch: Batch, gamma: float = 1.0) -> Tensor:
    """[N] the discounted return from each written token on; 0 at other tokens."""
    tokens = written(batch)
    return tokens.put(returns_at(batch, tokens, gamma))


def returns_at(batch: Batch, tokens: Written, gamma: float) -> Tensor:
    """[M] the discounted return from each written token on."""
    return recurrence(rewards_at(batch, tokens), tokens.offsets, gamma)


def is_constant(batch: Batch, gamma: float) -> bool:
    """Whether every token of a sequence has the same return."""
    return gamma == 1 and "token_rewards" not in batch.token


def reinforce(batch: Batch, gamma: float = 1.0, baseline: float = 0.0) -> Tensor:
    """Return-to-go minus a constant: A_t = sum_{s>=t} gamma^(s-t) r_s - baseline (Williams, 1992).

    Tokens the model did not write take no discount step. [S] for outcome rewards without discount, else [N].
    """
    if is_constant(batch, gamma):
        return batch.sequence["reward"] - baseline
    tokens = written(batch)
    return tokens.put(returns_at(batch, tokens, gamma).sub_(baseline))


def remax(batch: Batch) -> Tensor:
    """Return-to-go minus the reward of the prompt's greedy answer, `greedy_reward` [S]: A_t = sum_{s>=t} r_s - b(x).

    One extra decode a prompt instead of siblings; the greedy answer has no KL term in it and is never trained on.
    ReMax (2310.10505). [S] for outcome rewards, else [N].
    """
    baseline = batch.sequence["greedy_reward"]
    if is_constant(batch, 1.0):
        return batch.sequence["reward"] - baseline
    tokens = written(batch)
    return tokens.put(returns_at(batch, tokens, 1.0).sub_(tokens.spread(baseline)))


def reinforce_plus_plus(batch: Batch, gamma: float = 1.0, ddof: Literal[0, 1] = 1) -> Tensor:
    """Return-to-go, whitened over all tokens in the loss: no critic and no per-prompt baseline to overfit.

    REINFORCE++ (2501.03262). [S] for outcome rewards without discount, else [N].
    """
    if is_constant(batch, gamma):
        return whitened(batch.sequence["reward"], ddof, lengths_in_loss(batch))
    tokens = written(batch)
    return tokens.put(whitened_tokens(batch, tokens, returns_at(batch, tokens, gamma), ddof))


def raft(batch: Batch) -> Tensor:
    """[S] A = max(r, 0): learn from the good samples only. RAFT++ of Minimal-RL (2504.11343)."""
    return sequence_rewards(batch).clamp(min=0)


def none(batch: Batch) -> Tensor:
    """[S] zeros, for losses that make their own signal."""
    return torch.zeros_like(batch.sequence["reward"])
