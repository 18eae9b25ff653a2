"""Shared prefixes: samples of one prompt compute the prompt's hidden states once. Also: which rows a process computes.

A hidden state depends only on the tokens up to its position. Samples that begin with the same tokens therefore have the
same first hidden states in every layer, and only the remaining rows are computed per sample. Every sequence with the
prefix reads the prefix's keys and values; their gradients are summed over these sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from burnish.core.segments import ids_from_offsets, offsets_from_lengths

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values) -> attention output, all [rows, heads, head_dim]."""


@dataclass(frozen=True)
class SharedPrefixes:
    """The first `length[s]` tokens of sequence s equal those of sequence `owner[s]`.

    An owner is its own owner, and its `length` is ignored. `length` is less than the sequence's own length.
    """

    owner: Tensor  # [S]
    length: Tensor  # [S]


@dataclass(frozen=True)
class ComputedRows:
    """The U rows that are computed for a packing of N tokens, and the row of each token."""

    own: Tensor  # [U] the token that a row is computed for
    borrowed: Tensor  # [N - U] tokens whose row belongs to another sequence
    row_of: Tensor  # [N] the row of each token
    offsets: Tensor  # [S + 1] start of each sequence's own rows

    @property
    def num_rows(self) -> int:
        return self.own.shape[0]


def computed_rows(offsets: Tensor, shared_prefix: SharedPrefixes) -> ComputedRows:
    """The rows to compute for a packing with shared prefixes."""
    sequence = ids_from_offsets(offsets)
    position = torch.arange(sequence.shape[0], device=offsets.device) - offsets[sequence]
    owner = shared_prefix.owner[sequence]
    is_own = (owner == sequence) | (position >= shared_prefix.length[sequence])
    row = is_own.cumsum(0) - 1
    source = torch.where(is_own, torch.arange(sequence.shape[0], device=offsets.device), offsets[owner] + position)
    counts = torch.zeros_like(offsets[:-1]).index_add_(0, sequence, is_own.to(offsets.dtype))
    return ComputedRows(
        is_own.nonzero().squeeze(1), (~is_own).nonzero().squeeze(1), row[source], offsets_from_lengths(counts)
    )


class _ExpandRows(torch.autograd.Function):
    """A gather whose backward sums in float32, because a bfloat16 sum would be rounded once for every sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ComputedRows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.row_of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows: ComputedRows = ctx.rows
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        grad = grads[0].index_select(0, rows.own).to(wide)
        grad.index_add_(0, rows.row_of[rows.borrowed], grads[0].index_select(0, rows.borrowed).to(wide))
        return grad.to(grads[0].dtype), None


def expand_rows(x: Tensor, rows: ComputedRows) -> Tensor:
    """Expand computed rows [U, ...] to the tokens of the packing [N, ...]."""
    return _ExpandRows.apply(x, rows)


# --- Row shards: a process computes all rows of a micro-batch, or its slice with sequence parallelism.

MaybeTensor = TypeVar("MaybeTensor", Tensor, "Tensor | None")


class RowShard(Protocol):
    """The rows of one micro-batch that this process computes; m of the M wanted rows are among them."""

    at: Tensor
    """[m] indices of this process's wanted rows among its own rows; never empty."""

    def rows(self, column: Tensor) -> Tensor:
        """Select this process's rows of a column with one entry per row."""

    def attention(self, attend: Attend) -> Attend:
        """Attention over all rows, given queries, keys and values of this process's rows."""

    def select_wanted(self, column: Tensor) -> Tensor:
        """[M] to [m]: select the entries of this process's wanted rows."""

    def gather_wanted(self, values: MaybeTensor) -> MaybeTensor:
        """[m] to [M]: add the values of the other processes. The gradient flows to this process's values only."""


ShardRows = Callable[[int, Tensor], RowShard]
"""(number of rows, indices of the wanted rows [M]) -> this process's shard."""


class UnshardedRows:
    """This process computes all rows."""

    def __init__(self, at: Tensor) -> None:
        self.at = at

    def rows(self, column: Tensor) -> Tensor:
        return column

    def attention(self, attend: Attend) -> Attend:
        return attend

    def select_wanted(self, column: Tensor) -> Tensor:
        return column

    def gather_wanted(self, values: MaybeTensor) -> MaybeTensor:
        return values
