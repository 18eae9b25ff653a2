"""Slot `aggregation`: per-token losses to one number, as weights fixed on the whole mini-batch.

Since the weights hold every denominator, the loss is a plain weighted sum, and its gradient is the same for any split
of the mini-batch into micro-batches or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import contiguous_count


def aggregation_weights(batch: Batch, mode: str, horizon: int | None = None) -> Tensor:
    """[N] float64 weights such that the loss is sum(weights * loss per token); 0 outside the loss mask."""
    each = weights_of_sequences(batch, mode, horizon)
    return torch.repeat_interleave(each, batch.lengths).masked_fill_(~batch.loss_mask, 0)


def weights_of_sequences(batch: Batch, mode: str, horizon: int | None = None) -> Tensor:
    """[S] float64 the weight of every token in the loss of each sequence.

    token-mean: 1 / all tokens. token-sum: 1. seq-mean-token-sum: 1 / sequences. seq-mean-token-mean: 1 / (sequences x
    the sequence's tokens). seq-mean-token-sum-norm: 1 / (sequences x horizon), horizon a constant (Dr.GRPO). Only
    tokens in the loss, and sequences with at least one of them, are counted.
    """
    counts = contiguous_count(batch.loss_mask, batch.offsets)  # [S]
    tokens, sequences = max(int(counts.sum()), 1), max(int((counts > 0).sum()), 1)
    ones = torch.ones(counts.shape, dtype=torch.float64, device=counts.device)
    if mode == "seq-mean-token-mean":
        return ones / sequences / counts.clamp(min=1)
    if mode == "token-mean":
        return ones / tokens
    if mode == "token-sum":
        return ones
    if mode == "seq-mean-token-sum":
        return ones / sequences
    if mode == "seq-mean-token-sum-norm":
        if horizon is None:
            raise ValueError("seq-mean-token-sum-norm divides by a constant horizon, and none was given")
        return ones / sequences / horizon
    raise ValueError(f"unknown aggregation {mode!r}")
