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
    """[N] float64 weights such that the loss is sum(weights * loss per token); 0 outside the loss mask.

    token-mean: 1 / all tokens. token-sum: 1. seq-mean-token-sum: 1 / sequences. seq-mean-token-mean: 1 / (sequences x
    the sequence's tokens). seq-mean-token-sum-norm: 1 / (sequences x horizon), horizon a constant (Dr.GRPO). Only
    tokens in the loss, and sequences with at least one of them, are counted.
    """
    mask = batch.loss_mask
    per_sequence = contiguous_count(mask, batch.offsets)  # [S]
    tokens = int(per_sequence.sum())
    sequences = int((per_sequence > 0).sum())
    if mode == "seq-mean-token-mean":
        each = 1.0 / max(sequences, 1) / per_sequence.clamp(min=1).double()
        return torch.repeat_interleave(each, batch.lengths).masked_fill_(~mask, 0)
    weights = mask.to(torch.float64)
    if mode == "token-mean":
        return weights.div_(max(tokens, 1))
    if mode == "token-sum":
        return weights
    if mode == "seq-mean-token-sum":
        return weights.div_(max(sequences, 1))
    if mode == "seq-mean-token-sum-norm":
        if horizon is None:
            raise ValueError("seq-mean-token-sum-norm divides by a constant horizon, and none was given")
        return weights.div_(max(sequences, 1)).div_(horizon)
    raise ValueError(f"unknown aggregation {mode!r}")
