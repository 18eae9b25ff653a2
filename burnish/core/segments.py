"""Segment operations: they reduce packed (ragged) data by an id column, where code with padding reduces over an axis.

`ids[k]` is the segment of element k: its sequence, group or trajectory. Ids need not be sorted or contiguous.
An empty segment has sum 0, mean 0 and maximum -inf. Functions named `contiguous_*` take sorted runs, given by their offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Convert lengths [S] to offsets [S+1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ids_from_offsets(offsets: Tensor) -> Tensor:
    """Convert offsets [S+1] to the segment id of each element [N]."""
    return torch.repeat_interleave(offsets.diff())


def segment_sum(values: Tensor, ids: Tensor, num: int) -> Tensor:
    """Sum `values` within each of `num` segments."""
    return torch.zeros(num, dtype=values.dtype, device=values.device).index_add(0, ids, values)


def segment_count(ids: Tensor, num: int, mask: Tensor | None = None) -> Tensor:
    """Count the elements of each segment, or only those where `mask` is True."""
    ones = torch.ones_like(ids) if mask is None else mask.to(torch.int64)
    return segment_sum(ones, ids, num)


def segment_mean(values: Tensor, ids: Tensor, num: int, mask: Tensor | None = None) -> Tensor:
    """Mean of each segment, over the elements where `mask` is True; 0 if there are none."""
    if mask is not None:
        values = torch.where(mask, values, torch.zeros_like(values))
    count = segment_count(ids, num, mask).clamp(min=1)
    return segment_sum(values, ids, num) / count


def segment_max(values: Tensor, ids: Tensor, num: int) -> Tensor:
    """Largest value of each segment; -inf if it is empty."""
    start = torch.full((num,), -torch.inf, dtype=values.dtype, device=values.device)
    return start.scatter_reduce(0, ids, values, reduce="amax")


def segment_min(values: Tensor, ids: Tensor, num: int) -> Tensor:
    """Smallest value of each segment; +inf if it is empty."""
    return -segment_max(-values, ids, num)


def running_sum(x: Tensor) -> Tensor:
    """The cumulative sums of x [n]. In deterministic mode they are made on the host: torch's on a GPU have no fixed order."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x.cpu().cumsum(0).to(x.device)
    return x.cumsum(0)


def kth_smallest(x: Tensor, rank: int) -> Tensor:
    """The value of x [n] with `rank` values below it in sorted order. torch's kthvalue on a GPU refuses deterministic mode."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x.sort().values[rank]
    return x.kthvalue(rank + 1).values


def contiguous_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each run values[offsets[k]:offsets[k+1]], with gradient. Several times faster than `segment_sum`."""
    return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True, initial=0)


def contiguous_count(mask: Tensor, offsets: Tensor) -> Tensor:
    """Number of True elements in each run. A float32 sum is exact up to 16 million."""
    return contiguous_sum(mask.to(torch.float32), offsets).long()


def contiguous_broadcast(values: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """Repeat each run's value for its elements, with gradient. `ids` must be `ids_from_offsets(offsets)`."""
    return _ContiguousBroadcast.apply(values, ids, offsets) if values.requires_grad else values.index_select(0, ids)


class _ContiguousBroadcast(torch.autograd.Function):
    """`index_select` with a backward that sums run by run. The default backward takes three times as long as the forward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return values.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        return contiguous_sum(gradient.contiguous(), offsets), None, None


def segment_broadcast(values: Tensor, ids: Tensor) -> Tensor:
    """Repeat each segment's value for its elements."""
    return values.index_select(0, ids)  # `values[ids]` starts all threads even for a few thousand elements


def compact_ids(ids: Tensor) -> tuple[Tensor, int]:
    """Renumber arbitrary integer ids to 0..G-1; return the new ids and G."""
    unique, compact = torch.unique(ids, return_inverse=True)
    return compact, int(unique.numel())
