"""Segment operations: reductions over any id column, the ragged replacement for reductions over a padded axis.

`ids[k]` names the segment of element k (a sequence, a group, a trajectory); ids need not be sorted or contiguous.
An empty segment sums to 0, has mean 0 and maximum -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """[S] lengths to [S+1] boundaries."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ids_from_offsets(offsets: Tensor) -> Tensor:
    """[S+1] boundaries to the segment id of each of the N elements."""
    return torch.repeat_interleave(offsets.diff())


def segment_sum(values: Tensor, ids: Tensor, num: int) -> Tensor:
    """Sum of `values` within each of `num` segments."""
    return torch.zeros(num, dtype=values.dtype, device=values.device).index_add(0, ids, values)


def segment_count(ids: Tensor, num: int, mask: Tensor | None = None) -> Tensor:
    """Number of (unmasked) elements of each segment."""
    ones = torch.ones_like(ids) if mask is None else mask.to(torch.int64)
    return segment_sum(ones, ids, num)


def segment_mean(values: Tensor, ids: Tensor, num: int, mask: Tensor | None = None) -> Tensor:
    """Mean over the (unmasked) elements of each segment; 0 where there are none."""
    if mask is not None:
        values = torch.where(mask, values, torch.zeros_like(values))
    count = segment_count(ids, num, mask).clamp(min=1)
    return segment_sum(values, ids, num) / count


def segment_max(values: Tensor, ids: Tensor, num: int) -> Tensor:
    """Largest value of each segment; -inf where there is none."""
    start = torch.full((num,), -torch.inf, dtype=values.dtype, device=values.device)
    return start.scatter_reduce(0, ids, values, reduce="amax")


def segment_min(values: Tensor, ids: Tensor, num: int) -> Tensor:
    """Smallest value of each segment; +inf where there is none."""
    return -segment_max(-values, ids, num)


def contiguous_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each run values[offsets[k]:offsets[k+1]], with gradient; several times faster than by ids."""
    return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True, initial=0)


def contiguous_count(mask: Tensor, offsets: Tensor) -> Tensor:
    """How many elements of each run are True; a float32 counts 16 million of them exactly."""
    return contiguous_sum(mask.to(torch.float32), offsets).long()


def contiguous_broadcast(values: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """A value per run to a value per element, with gradient; `ids` are those of `offsets`."""
    return _ContiguousBroadcast.apply(values, ids, offsets) if values.requires_grad else values.index_select(0, ids)


class _ContiguousBroadcast(torch.autograd.Function):
    """`index_select` whose gradient is summed run by run: by ids it takes three times as long as the way there."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return values.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        return contiguous_sum(gradient.contiguous(), offsets), None, None


def segment_broadcast(values: Tensor, ids: Tensor) -> Tensor:
    """A value per segment to a value per element."""
    return values.index_select(0, ids)  # plain indexing wakes all threads for a few thousand elements


def compact_ids(ids: Tensor) -> tuple[Tensor, int]:
    """Arbitrary integer ids renumbered 0..G-1, and G."""
    unique, compact = torch.unique(ids, return_inverse=True)
    return compact, int(unique.numel())
