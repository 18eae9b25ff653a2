"""Packed sequences whose first tokens are another's go through the layers once: the samples of one prompt share it.

A row of hidden states depends on the tokens up to it alone, so samples that begin with the same tokens have the same
first rows, in every layer. Only rows of their own are computed; keys and values of shared rows are read by every sequence
that begins with them, and get the sum of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from burnish.core.segments import ids_from_offsets, offsets_from_lengths


@dataclass(frozen=True)
class SharedPrefixes:
    """The first `length[s]` tokens of sequence s are those of sequence `owner[s]`, which is its own owner; [S] each.

    `length` is less than the sequence's own; for an owner it does not count.
    """

    owner: Tensor
    length: Tensor


@dataclass(frozen=True)
class ComputedRows:
    """Which rows of a packing [N] are computed [U], and which row each token's is."""

    own: Tensor  # [U] the token a row is computed for
    borrowed: Tensor  # [N - U] the tokens that have no row of their own
    row_of: Tensor  # [N]
    offsets: Tensor  # [S + 1] where each sequence's own rows begin

    @property
    def num_rows(self) -> int:
        return self.own.shape[0]


def computed_rows(offsets: Tensor, shared_prefix: SharedPrefixes) -> ComputedRows:
    """The rows of a packing with shared beginnings."""
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
    """A gather whose backward adds up in float32: eight gradients rounded into a bfloat16 sum one by one are not a sum."""

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
    """[U, ...] rows to the [N, ...] tokens of the packing."""
    return _ExpandRows.apply(x, rows)


# --- Which rows of a micro-batch a process computes: all of them, or its slice where several share the work.

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
MaybeTensor = TypeVar("MaybeTensor", Tensor, "Tensor | None")


class RowShard(Protocol):
    """One micro-batch, cut: M wanted rows among all that are computed, and which of both are here."""

    at: Tensor
    """[m] where the wanted rows that are here stand among the rows that are here; never empty."""

    def rows(self, column: Tensor) -> Tensor:
        """Of a column with an entry a row, the part that is computed here."""

    def attention(self, attend: Attend) -> Attend:
        """Attention over all rows, given queries, keys and values of the rows that are here."""

    def mine(self, column: Tensor) -> Tensor:
        """[M] to [m]: of a column with an entry a wanted row, the entries of `at`."""

    def whole(self, values: MaybeTensor) -> MaybeTensor:
        """[m] to [M]: what was computed at `at`, with the values of the other processes; the gradient is of this one's alone."""


ShardRows = Callable[[int, Tensor], RowShard]
"""(number of rows, the wanted ones [M]) -> the cut."""


class UnshardedRows:
    """Everything is here."""

    def __init__(self, at: Tensor) -> None:
        self.at = at

    def rows(self, column: Tensor) -> Tensor:
        return column

    def attention(self, attend: Attend) -> Attend:
        return attend

    def mine(self, column: Tensor) -> Tensor:
        return column

    def whole(self, values: MaybeTensor) -> MaybeTensor:
        return values
