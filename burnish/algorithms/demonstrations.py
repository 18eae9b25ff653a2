"""Which sequences of a batch the policy sampled, and which somebody else wrote: demonstrations inside the groups."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.batch import Batch

COLUMN = "demonstration"


def has_demonstrations(batch: Batch) -> bool:
    """Whether any sequence is one."""
    return COLUMN in batch.sequence and bool(batch.sequence[COLUMN].any())


def sampled(batch: Batch) -> Batch:
    """The sequences that the policy sampled: what a comparison of the sampler with the trainer is of."""
    return batch.select((~batch.sequence[COLUMN]).nonzero().squeeze(1)) if has_demonstrations(batch) else batch


def sampled_tokens(batch: Batch) -> Tensor:
    """[N] the tokens of the sequences that the policy sampled."""
    if not has_demonstrations(batch):
        return torch.ones_like(batch.loss_mask)
    return ~batch.sequence[COLUMN][batch.sequence_ids]


def sampled_in_loss(batch: Batch) -> Tensor:
    """[N] the tokens in the loss that the policy sampled."""
    return batch.loss_mask & sampled_tokens(batch)


def put_back(batch: Batch, column: Tensor, elsewhere: float | bool) -> Tensor:
    """[N] a token column of `sampled(batch)`, with a value of their own at the tokens of demonstrations."""
    whole = torch.full((batch.num_tokens,), elsewhere, dtype=column.dtype, device=column.device)
    whole[~batch.sequence[COLUMN][batch.sequence_ids]] = column
    return whole
