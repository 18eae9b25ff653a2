"""`LossView`, the input of a loss: the tokens in the loss of a mini-batch, or of a part of it that holds whole sequences.

A loss of scope `token` or `sequence` gets one view per micro-batch. A loss of scope `group` or `batch` gets one view of
the whole mini-batch, with log-probs as leaves (see `training/learner.py`). Tokens outside the loss are left out, so
nothing needs masking, and a sequence without a token in the loss has length 0.

A trajectory of several sequences is one sequence of the view: a loss with one ratio or one number per sequence has one per
trajectory. A mini-batch with such trajectories has the column `answer_ids`, and the learner keeps their groups whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import ANSWER_COLUMN, first_sequences
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_broadcast, contiguous_sum, ids_from_offsets

TokenLoss = tuple[Tensor, dict[str, Tensor]]
"""[M] a loss or weight per token, and token metrics: columns [M] whose mean over tokens is the metric of that name."""


@dataclass(frozen=True)
class LossView:
    """M tokens of S sequences, in order. `logp`, `entropy`, `value` and `kl` carry the gradient."""

    offsets: Tensor  # [S+1] where each sequence's tokens start among the M
    token: Mapping[str, Tensor]  # [M] columns
    sequence: Mapping[str, Tensor]  # [S] columns
    logp: Tensor | None = None  # [M] of the policy being trained
    entropy: Tensor | None = None  # [M]
    value: Tensor | None = None  # [M] of a critic
    kl: Tensor | None = None  # [M] to the reference, over the whole vocabulary

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_sequences(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:  # [S]
        return self.offsets.diff()

    @cached_property
    def sequence_ids(self) -> Tensor:
        """[M] the sequence of each token."""
        return ids_from_offsets(self.offsets)

    @property
    def policy_logp(self) -> Tensor:
        """[M] `logp` of a view that must have it."""
        assert self.logp is not None, "the learner gives log-probs to a policy's loss"
        return self.logp

    def has(self, name: str) -> bool:
        """Whether there is a column of this name, per token or per sequence."""
        return name in self.token or name in self.sequence

    def column(self, name: str) -> Tensor:
        """[M] a token column, or a sequence column spread over its tokens."""
        return self.token[name] if name in self.token else self.spread(self.sequence[name])

    def spread(self, values: Tensor) -> Tensor:
        """[S] to [M]: each sequence's value at all its tokens."""
        return contiguous_broadcast(values, self.sequence_ids, self.offsets)

    def sum(self, values: Tensor) -> Tensor:
        """[M] to [S]: sum over each sequence's tokens, with gradient; 0 for a sequence without tokens."""
        return contiguous_sum(values, self.offsets)

    def mean(self, values: Tensor) -> Tensor:
        """[M] to [S]: mean over each sequence's tokens, with gradient; 0 for a sequence without tokens."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def select(self, is_kept: Tensor) -> LossView:
        """The view of the tokens [M] that are kept; a sequence without any has length 0."""
        where = is_kept.nonzero().squeeze(1)
        outputs = (self.logp, self.entropy, self.value, self.kl)
        return LossView(
            torch.searchsorted(where, self.offsets),
            _SelectedColumns(self.token, where),
            self.sequence,
            *(None if column is None else column.index_select(0, where) for column in outputs),
        )

    def sequence_mean_metric(self, values: Tensor) -> Tensor:
        """[S] to [M]: a token metric whose mean over tokens is the mean of `values` over sequences with a token.

        Only for a view of the whole mini-batch (scope group or batch): a part of it does not know these counts.
        """
        scale = self.num_tokens / (self.lengths > 0).sum().clamp(min=1)
        return self.spread(values / self.lengths.clamp(min=1)) * scale


def loss_view(
    batch: Batch,
    logp: Tensor | None = None,
    entropy: Tensor | None = None,
    value: Tensor | None = None,
    kl: Tensor | None = None,
    joins_answers: bool = True,
) -> LossView:
    """The tokens of a batch that are in the loss; float columns have the dtype of `logp` or `value`.

    The sequences of an answer (column `answer_ids`) become one, which needs all of them side by side. A loss of scope `token`
    computes the same without `joins_answers`, on any part of an answer.
    """
    mask = batch.loss_mask
    carrier = logp if logp is not None else value
    dtype = carrier.dtype if carrier is not None else torch.float64
    where = None if bool(mask.all()) else mask.nonzero().squeeze(1)
    first = first_sequences(batch) if joins_answers and ANSWER_COLUMN in batch.sequence else None
    starts = batch.offsets if first is None else torch.cat([batch.offsets[first], batch.offsets[-1:]])
    offsets = starts if where is None else torch.searchsorted(where, starts)
    columns = _LazyTokenColumns(batch, dtype, where, starts, offsets), _LazyColumns(batch.sequence, dtype, first)
    return LossView(offsets, *columns, logp, entropy, value, kl)


class _LazyColumns(Mapping[str, Tensor]):
    """Columns converted to the loss's dtype on access, because a loss reads few of them; of the rows `rows`, None for all."""

    def __init__(self, columns: Mapping[str, Tensor], dtype: torch.dtype, rows: Tensor | None = None) -> None:
        self.columns, self.dtype, self.rows = columns, dtype, rows

    def __getitem__(self, name: str) -> Tensor:
        column = self.columns[name] if self.rows is None else self.columns[name].index_select(0, self.rows)
        return column.to(self.dtype) if column.is_floating_point() else column

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


class _SelectedColumns(Mapping[str, Tensor]):
    """Columns at the tokens `where` of another view."""

    def __init__(self, columns: Mapping[str, Tensor], where: Tensor) -> None:
        self.columns, self.where = columns, where

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name].index_select(0, self.where)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


class _LazyTokenColumns(_LazyColumns):
    """Token columns at the indices `where` (None: all tokens), and `position`, each token's index in its sequence.

    `starts` are the offsets of the view's sequences among all tokens, `offsets` those among the tokens of the view.
    """

    def __init__(self, batch: Batch, dtype: torch.dtype, where: Tensor | None, starts: Tensor, offsets: Tensor) -> None:
        super().__init__({**batch.token, "position": batch.tokens}, dtype)
        self.batch, self.where, self.starts, self.offsets = batch, where, starts, offsets

    def __getitem__(self, name: str) -> Tensor:
        if name == "position":
            where = torch.arange(self.batch.num_tokens, device=self.starts.device) if self.where is None else self.where
            return where - torch.repeat_interleave(self.starts[:-1], self.offsets.diff())
        column = super().__getitem__(name)
        return column if self.where is None else column.index_select(0, self.where)
