"""Shapers against repetition, which length rewards invite (Demystifying long chain-of-thought, 2502.03373)."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.advantages import discounted_returns
from burnish.algorithms.shaping.ngrams import repeat_share, windows
from burnish.core.batch import Batch


def repetition(batch: Batch, step: int, *, ngram: int = 40, penalty: float = -1.0) -> Tensor:
    """[S] the reward plus penalty * (1 - unique / total) over the n-grams written; 0 with fewer than n tokens."""
    return batch.sequence["reward"] + penalty * repeat_share(batch, ngram)


def repetition_dense(
    batch: Batch, step: int, *, ngram: int = 40, penalty: float = -0.05, gamma: float = 0.99
) -> Tensor:
    """[N] token rewards to add: `penalty` at every token of an n-gram already seen, with its own discount.

    With R_t the gamma-discounted return of the penalties, token t gets R_t - R_{t+1}: the undiscounted return-to-go of
    that is R_t, so the sum of the two streams has the outcome undiscounted and the penalties discounted.
    """
    mask, ids = batch.action_mask, batch.sequence_ids
    penalties = penalty * in_repeats(batch, ngram).double()
    returns = discounted_returns(penalties, mask, batch.offsets, gamma)
    written = mask.nonzero().squeeze(1)
    own, following = returns[written], torch.zeros_like(returns[written])
    same = ids[written[1:]] == ids[written[:-1]]
    following[:-1] = torch.where(same, own[1:], following[:-1])
    return torch.zeros_like(returns).index_copy(0, written, own - following)


def in_repeats(batch: Batch, ngram: int) -> Tensor:
    """[N] bool: the token is written and part of an n-gram that began earlier in the trajectory."""
    written = batch.action_mask.nonzero().squeeze(1)
    found = windows(batch, ngram)
    start = found.start[found.repeated]
    edges = torch.zeros(written.numel() + 1, dtype=torch.int64, device=written.device)
    ones = torch.ones_like(start)
    depth = edges.index_add(0, start, ones).index_add(0, start + ngram, -ones).cumsum(0)[:-1]
    return torch.zeros_like(batch.action_mask).index_copy(0, written, depth > 0)
