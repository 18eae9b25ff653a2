"""The tokens the model wrote, side by side: what every estimator that works token by token computes on.

Prompts and tool answers are not there at all, so the next element is the next written token, observation tokens take no
discount step, and whatever those tokens hold (NaN even) is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum


@dataclass(frozen=True)
class Written:
    """M written tokens of S sequences, in order."""

    where: Tensor | None  # [M] their places among the N tokens; None when the model wrote all of them
    offsets: Tensor  # [S+1] where each sequence's tokens start among the M
    num_tokens: int  # N

    @property
    def lengths(self) -> Tensor:  # [S]
        return self.offsets.diff()

    @property
    def last(self) -> Tensor:
        """[S] each sequence's last written token among the M; every sequence must have one."""
        empty = self.lengths == 0
        if bool(empty.any()):
            sequence = int(empty.nonzero()[0])
            raise ValueError(f"sequence {sequence} has no token the model wrote, so its reward has no place")
        return self.offsets[1:] - 1

    def take(self, column: Tensor) -> Tensor:
        """[N] to [M]."""
        return column if self.where is None else column.index_select(0, self.where)

    def put(self, values: Tensor) -> Tensor:
        """[M] to [N], 0 at the other tokens."""
        if self.where is None:
            return values
        return values.new_zeros(self.num_tokens).index_copy_(0, self.where, values)

    def spread(self, values: Tensor) -> Tensor:
        """[S] to [M]: each sequence's value at all its tokens."""
        return torch.repeat_interleave(values, self.lengths)


def written(batch: Batch) -> Written:
    """The tokens of a batch that the model wrote."""
    return written_of(batch.action_mask, batch.offsets)


def written_of(mask: Tensor, offsets: Tensor) -> Written:
    """The tokens of a mask [N] over sequences with these boundaries [S+1]."""
    if bool(mask.all()):
        return Written(None, offsets, mask.numel())
    where = mask.nonzero().squeeze(1)
    return Written(where, torch.searchsorted(where, offsets), mask.numel())


def written_lengths(batch: Batch) -> Tensor:
    """[S] how many tokens the model wrote in each sequence."""
    return contiguous_sum(batch.action_mask.to(torch.float32), batch.offsets).long()


def lengths_in_loss(batch: Batch) -> Tensor:
    """[S] how many tokens of each sequence are in the loss: what the model wrote, less what a correction rejected."""
    return contiguous_sum(batch.token.get("loss_mask", batch.action_mask).to(torch.float32), batch.offsets).long()


def whitened(values: Tensor, ddof: int, counts: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens in the loss; with one token or none, x - mean.

    `values` is one a written token [M], or one a sequence [S]; each stands for `counts` tokens, for one where none are given.
    `ddof` 1 divides the variance by n - 1 (verl), 0 by n (OpenRLHF).
    """
    n = values.numel() if counts is None else int(counts.sum())
    if n == 0:
        return values
    if counts is None:
        centred = values - values.mean()
        total = centred.square().sum()
    else:
        centred = values - (values * counts).sum() / n
        total = (centred.square() * counts).sum()
    if n == 1:
        return centred
    return centred.div_((total / (n - ddof) + 1e-8).sqrt())


def whitened_tokens(batch: Batch, tokens: Written, values: Tensor, ddof: int) -> Tensor:
    """`whitened` for one value a written token [M]: rejected tokens are scaled like the others but do not count."""
    mask = batch.token.get("loss_mask", batch.action_mask)
    in_loss = tokens.take(mask)
    return whitened(values, ddof, None if bool(in_loss.all()) else in_loss)
