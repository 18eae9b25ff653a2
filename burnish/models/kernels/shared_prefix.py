"""Shared prefixes: tokens that several sequences begin with have their hidden states computed once. Also: which rows a process computes.

A hidden state depends only on the tokens up to its position. Sequences that begin with the same tokens therefore have the same
first hidden states in every layer. The sequences of a packing form a prefix tree: they are in depth-first order, and each one shares
its first `shared[s]` tokens with the sequence before it. The rows of the other tokens are its own. A shared row may belong to any
earlier sequence, so a tree may have any depth. Every sequence with a prefix reads the prefix's keys and values; their gradients are
summed over these sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values) -> attention output, all [rows, heads, head_dim]."""


@dataclass(frozen=True)
class ComputedRows:
    """The U rows that are computed for a packing of N tokens, and the row of each token."""

    own: Tensor  # [U] the token that a row is computed for
    borrowed: Tensor  # [N - U] tokens whose row belongs to an earlier sequence
    row_of: Tensor  # [N] the row of each token
    offsets: Tensor  # [S + 1] start of each sequence's own rows
    shared: tuple[int, ...]  # [S] tokens that each sequence shares with the one before it

    @property
    def num_rows(self) -> int:
        return self.own.shape[0]


def computed_rows(offsets: Tensor, shared: Tensor) -> ComputedRows:
    """The rows to compute for a packing in which sequence s shares its first `shared[s]` tokens with sequence s - 1."""
    starts, counts = offsets.tolist(), shared.tolist()
    row_of, is_own = np.empty(starts[-1], dtype=np.int64), np.ones(starts[-1], dtype=bool)
    own_starts, before = [0], 0
    for start, end, count in zip(starts, starts[1:], counts, strict=False):
        if count > before or (count and count >= end - start):
            raise ValueError(
                f"the sequence at token {start} has {end - start} tokens and the one before it {before}: it cannot share {count} "
                "and have a token of its own"
            )
        row_of[start : start + count] = row_of[start - before : start - before + count]
        row_of[start + count : end] = np.arange(own_starts[-1], own_starts[-1] + end - start - count)
        is_own[start : start + count] = False
        own_starts.append(own_starts[-1] + end - start - count)
        before = end - start
    own, borrowed, row, own_offsets = (
        torch.from_numpy(column).to(offsets.device)
        for column in (is_own.nonzero()[0], (~is_own).nonzero()[0], row_of, np.array(own_starts))
    )
    return ComputedRows(own, borrowed, row, own_offsets, tuple(counts))


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


# --- Row shards: a process computes all rows of a micro-batch, or its shard with sequence or context parallelism.

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

    def sum_over_rows(self, values: Tensor) -> Tensor:
        """The sum of sums over rows that each process has of its own. It has no gradient."""


ShardRows = Callable[[Sequence[int], ComputedRows | None, Tensor], RowShard]
"""(lengths of the sequences [S], the computed rows if prefixes are shared, indices of the wanted rows [M]) -> this process's shard."""


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

    def sum_over_rows(self, values: Tensor) -> Tensor:
        return values
