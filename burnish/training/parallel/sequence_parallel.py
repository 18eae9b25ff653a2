"""Sequence parallelism: the ranks of a group divide the rows of the same micro-batch (DeepSpeed-Ulysses, 2309.14509).

Everything but attention works row by row, so each rank computes an equal slice of the rows, across sequence borders. For
attention, an all-to-all turns rows with all heads into all rows with a part of the heads, and back. Where key/value heads cannot be
divided, `context_parallel.py` gathers keys instead.

Labels are assigned on the whole micro-batch before the split, so the last row of a slice has its label. The head's outputs at the
wanted rows are gathered: every rank sees the whole loss, and differentiates it by the rows it computed. Parameter gradients are
therefore sums over the ranks of a sequence-parallel group as well.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.decoder import Decoder
from burnish.models.kernels.shared_prefix import Attend, MaybeTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def apply_sequence_parallel(backbone: Decoder, group: ProcessGroup) -> None:
    """Make a decoder compute only this rank's rows of each micro-batch, and attend with its heads. The ranks must divide the heads."""
    backbone.shard_rows = lambda lengths, rows, wanted: SequenceSlice(
        group, sum(lengths) if rows is None else rows.num_rows, wanted
    )


class GatheredOutputs:
    """Which of the wanted rows of a micro-batch this rank computes, and how the values of all ranks are put together.

    Wanted row i is row `index[i]` of rank `owner[i]`; both are [M].
    """

    def __init__(self, group: ProcessGroup, owner: Tensor, index: Tensor) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        counts = torch.bincount(owner, minlength=self.size)
        self.width = max(1, int(counts.max()))
        # Position of each wanted row's value after the all-gather, which gives `width` values per rank.
        order = owner.argsort(stable=True)
        among = torch.empty_like(order)
        among[order] = torch.arange(order.shape[0], device=order.device) - (counts.cumsum(0) - counts)[owner[order]]
        self.place = owner * self.width + among
        self.chosen = (owner == self.rank).nonzero().squeeze(1)
        self.count = self.chosen.shape[0]
        if self.count:
            self.at = index[self.chosen]
        else:  # a dummy row, so that this rank takes part in the backward pass
            self.chosen = self.at = torch.zeros(1, dtype=torch.long, device=owner.device)

    def select_wanted(self, column: Tensor) -> Tensor:
        """[M] to [m]: the entries of wanted rows that this rank computes."""
        return column[self.chosen]

    def gather_wanted(self, values: MaybeTensor) -> MaybeTensor:
        """[m] to [M]: the values of all ranks at the wanted rows."""
        if values is None:
            return values
        padded = functional.pad(values[: self.count], (0, self.width - self.count))
        return _AllGather.apply(padded, self.group)[self.place]

    def sum_over_rows(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values, without gradient."""
        from torch.distributed import all_reduce

        total = values.detach().clone()
        all_reduce(total, group=self.group)
        return total


class SequenceSlice(GatheredOutputs):
    """This rank's slice of a micro-batch of `num_rows` rows. All slices have `each` rows; the last ones are padded."""

    def __init__(self, group: ProcessGroup, num_rows: int, wanted: Tensor) -> None:
        self.num_rows, self.each = num_rows, math.ceil(num_rows / group.size())
        super().__init__(group, wanted // self.each, wanted % self.each)

    def rows(self, column: Tensor) -> Tensor:
        """[num_rows] to [each]: this rank's rows of a column."""
        return self._padded(column)[self.rank * self.each : (self.rank + 1) * self.each]

    def attention(self, attend: Attend) -> Attend:
        """Attention of all rows over this rank's heads, between two all-to-all exchanges."""

        def exchanged(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = q.shape[1] // self.size
            parts = [x.unflatten(1, (self.size, -1)) for x in (q, k, v)]  # [each, ranks, heads per rank, D]
            by_rank = torch.cat(parts, 2).transpose(0, 1).contiguous()
            local = _AllToAll.apply(by_rank, self.group).flatten(0, 1)[: self.num_rows]  # [num_rows, heads per rank, D]
            q, k, v = local.split([part.shape[2] for part in parts], 1)
            out = self._padded(attend(layer, q, k, v)).unflatten(0, (self.size, self.each)).contiguous()
            back = _AllToAll.apply(out, self.group)  # [ranks, each, heads per rank, D]
            return back.transpose(0, 1).reshape(self.each, self.size * heads, -1)

        return exchanged

    def _padded(self, column: Tensor) -> Tensor:
        """[num_rows, ...] padded with zeros to `each` rows per rank."""
        missing = self.size * self.each - column.shape[0]
        return torch.cat([column, column.new_zeros(missing, *column.shape[1:])]) if missing else column


class _AllToAll(torch.autograd.Function):
    """[ranks, ...]: entry j goes to rank j, and rank j's entry arrives as entry j. The gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        from torch.distributed import all_to_all_single

        ctx.group = group
        out = torch.empty_like(x)
        all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None


class _AllGather(torch.autograd.Function):
    """[width] to [ranks * width]. Every rank differentiates the whole loss, so each takes only the gradient of its own entries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        from torch.distributed import all_gather

        ctx.start = group.rank() * x.shape[0]
        ctx.width = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][ctx.start : ctx.start + ctx.width], None
