"""Causal attention of short packed sequences on a CPU: one operation, by batched matmuls on stacks of similar lengths.

While the scores are small, explicit ones are faster than torch's fused kernel. What takes the time then is moving rows about,
so rows go straight from where they stand, as heads of a wider projection, into the stacks that the matmuls read, and results
straight back: one gather each way, shared beginnings (`ops/trunks.py`) included. The mask is causal and padding comes last, so no
query of a real token sees it; queries of padding and of rows that another sequence computes are left alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.models.ops.trunks import Rows

WASTE = 1.25
"""A stack's longest sequence over its shortest."""
SCORES = 1 << 17
"""Scores of one head of a stack, at most, unless a sequence has more: what is computed from them then finds them in a cache."""


class Stack(NamedTuple):
    """Sequences of about the same length, padded to it; its tokens stand from `first` on among those of all stacks."""

    first: int
    num: int
    length: int


class Stacks:
    """Where the rows of a packing stand in stacks, planned once for all layers.

    A slot is a place for a token; T of them in all. The rows of heads [U, heads, D] stand in a matrix [T * heads, D], head
    by head within each sequence.
    """

    def __init__(self, lengths: list[int], offsets: Tensor, rows: Rows | None) -> None:
        members = stacked_sequences(lengths)
        index = torch.tensor([i for stack in members for i in stack])
        widths = torch.tensor([lengths[stack[-1]] for stack in members for _ in stack])
        self.parts: list[Stack] = []
        for stack in members:
            first = self.parts[-1].first + self.parts[-1].num * self.parts[-1].length if self.parts else 0
            self.parts.append(Stack(first, len(stack), lengths[stack[-1]]))
        self.length = widths.repeat_interleave(widths)  # [T] of the slot's stack
        start = (widths.cumsum(0) - widths).repeat_interleave(widths)  # [T] where its sequence begins
        self.column = torch.arange(self.length.shape[0]) - start  # [T] the position in the sequence
        own_length = offsets.diff()[index].repeat_interleave(widths)
        token = offsets[index].repeat_interleave(widths) + torch.minimum(self.column, own_length - 1)
        is_real = self.column < own_length
        self.row = token if rows is None else rows.row_of[token]
        is_own = is_real if rows is None else is_real & (rows.own[self.row] == token)
        num_rows = int(offsets[-1]) if rows is None else rows.num_rows
        self.own = torch.empty(num_rows, dtype=torch.long)  # [U] the slot that computes a row
        self.own[self.row[is_own]] = is_own.nonzero().squeeze(1)
        self.idle = (~is_own).nonzero().squeeze(1)  # queries that nobody wants
        self.lent = (is_real & ~is_own).nonzero().squeeze(1)  # keys and values that are another sequence's
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def places(self, slots: Tensor, heads: int) -> Tensor:
        """[n * heads] where the heads of the tokens in these slots stand in a stacked matrix."""
        column, length = self.column[slots], self.length[slots]
        first = (slots - column) * heads + column
        return (first[:, None] + length[:, None] * torch.arange(heads)).view(-1)

    def index(self, kind: str, heads: int, span: int = 0) -> Tensor:
        """Index tensors by what they are for: made when first needed, the same for every layer."""
        key = kind, heads, span
        if key not in self._made:
            self._made[key] = self._make(kind, heads, span)
        return self._made[key]

    def _make(self, kind: str, heads: int, span: int) -> Tensor:
        head = torch.arange(heads)
        if kind == "gather":  # [T * heads] which row of a matrix with `span` rows a token comes to each place
            every = torch.arange(self.row.shape[0])
            index = torch.empty(every.shape[0] * heads, dtype=torch.long)
            index[self.places(every, heads)] = (self.row[:, None] * span + head).view(-1)
            return index
        if kind == "lent rows":
            return (self.row[self.lent][:, None] * heads + head).view(-1)
        return self.places({"own": self.own, "idle": self.idle, "lent": self.lent}[kind], heads)

    def hidden(self, length: int, window: int | None, shared: int, dtype: torch.dtype) -> Tensor:
        """[shared * query, key]: -inf where the key is later or before the window, else 0."""
        key = length, window, shared, dtype
        if key not in self._made:
            bias = torch.zeros(length, length, dtype=dtype).masked_fill_(~visible(length, window), -torch.inf)
            self._made[key] = bias.repeat(shared, 1)
        return self._made[key]

    def stacked(self, x: Tensor) -> Tensor:
        """Heads [U, heads, D] as [T * heads, D]."""
        matrix, span = _matrix(x)
        return matrix.index_select(0, self.index("gather", x.shape[1], span))

    def back(self, stacked: Tensor, heads: int) -> Tensor:
        """[T * heads, D] as heads [U, heads, D]: of every row the slot that computes it."""
        return stacked.index_select(0, self.index("own", heads)).view(-1, heads, stacked.shape[1])

    def summed(self, stacked: Tensor, heads: int) -> Tensor:
        """The same with what all other slots of a row hold added: the gradient of `stacked`."""
        found = self.back(stacked, heads)
        if self.lent.numel():
            lent = stacked.index_select(0, self.index("lent", heads))
            found.view(-1, stacked.shape[1]).index_add_(0, self.index("lent rows", heads), lent)
        return found


class _StackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, stacks: Stacks, window: int | None) -> Tensor:
        heads, kv_heads = q.shape[1], k.shape[1]
        queries, keys, values = (stacks.stacked(x) for x in (q, k, v))
        out = torch.empty_like(queries)
        weights = []
        for stack in stacks.parts:
            q_, k_, v_, out_ = _parts(stack, heads, kv_heads, queries, keys, values, out)
            bias = stacks.hidden(stack.length, window, heads // kv_heads, q.dtype)
            scores = torch.baddbmm(bias, q_, k_.transpose(1, 2), alpha=q.shape[2] ** -0.5)
            weights.append(scores.softmax(-1))
            torch.bmm(weights[-1], v_, out=out_)
        ctx.save_for_backward(queries, keys, values, *weights)
        ctx.stacks, ctx.heads, ctx.kv_heads = stacks, heads, kv_heads
        return stacks.back(out, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        queries, keys, values, *weights = ctx.saved_tensors
        stacks, heads, kv_heads = ctx.stacks, ctx.heads, ctx.kv_heads
        grad = stacks.stacked(grads[0]).index_fill_(0, stacks.index("idle", heads), 0.0)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (queries, keys, values))
        scale = queries.shape[1] ** -0.5
        for stack, weight in zip(stacks.parts, weights, strict=True):
            q_, k_, v_, g_ = _parts(stack, heads, kv_heads, queries, keys, values, grad)
            to_q, to_k, to_v, _ = _parts(stack, heads, kv_heads, grad_q, grad_k, grad_v, grad)
            torch.bmm(weight.transpose(1, 2), g_, out=to_v)
            slope = torch.bmm(g_, v_.transpose(1, 2))
            slope = torch.ops.aten._softmax_backward_data(slope, weight, -1, weight.dtype)
            torch.baddbmm(to_q, slope, k_, beta=0, alpha=scale, out=to_q)
            torch.baddbmm(to_k, slope.transpose(1, 2), q_, beta=0, alpha=scale, out=to_k)
        return stacks.back(grad_q, heads), stacks.summed(grad_k, kv_heads), stacks.summed(grad_v, kv_heads), None, None


def stacked_attention(q: Tensor, k: Tensor, v: Tensor, stacks: Stacks, window: int | None) -> Tensor:
    """[U, heads, D]: queries [U, heads, D] against keys and values [U, kv_heads, D] of the same rows, each in its sequence."""
    return _StackedAttention.apply(q, k, v, stacks, window)


def visible(length: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """[query, key]: the key is not later, and within the window if there is one."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask & ~mask.tril(-window)


def stacked_sequences(lengths: list[int]) -> list[list[int]]:
    """Which sequences stand together, from the shortest to the longest; empty ones nowhere."""
    stacks: list[list[int]] = []
    for i in sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: lengths[i]):
        shortest = lengths[stacks[-1][0]] if stacks else 0
        is_alike = lengths[i] <= max(shortest * WASTE, shortest + 4)
        if stacks and is_alike and (len(stacks[-1]) + 1) * lengths[i] ** 2 <= SCORES:
            stacks[-1].append(i)
        else:
            stacks.append([i])
    return stacks


def _parts(stack: Stack, heads: int, kv_heads: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    """The slices of a stack as batches of matrices. Query heads that share a key head stand one below the other: no key is repeated."""
    shared, dim = heads // kv_heads, q.shape[1]
    found = []
    for x, per_key in ((q, shared), (k, 1), (v, 1), (out, shared)):
        rows = x[stack.first * kv_heads * per_key :][: stack.num * stack.length * kv_heads * per_key]
        found.append(rows.view(stack.num * kv_heads, per_key * stack.length, dim))
    return found


def _matrix(x: Tensor) -> tuple[Tensor, int]:
    """Heads [U, heads, D], perhaps some of a wider projection's, as rows of a matrix without copying; and its rows a token."""
    num, heads, dim = x.shape
    if x.stride()[1:] == (dim, 1) and x.stride(0) % dim == 0:
        span = x.stride(0) // dim
        return x.as_strided(((num - 1) * span + heads, dim), (dim, 1)), span
    return x.contiguous().view(-1, dim), heads
