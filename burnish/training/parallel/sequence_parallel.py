"""Sequence parallelism: several ranks cut the rows of the same micro-batch among them (DeepSpeed-Ulysses, 2309.14509).

Everything but attention is done row by row, so each rank computes an even slice of the rows, across the borders of
sequences. For attention the ranks exchange: rows of some heads become all rows of fewer heads, and back. Where there are
fewer key/value heads than ranks each is sent to all ranks whose query heads read it.

Which token a row predicts is settled before the cut, on the whole micro-batch, so the last row of a slice has its label.
What the head says about the wanted rows is put together again: every rank sees the whole loss, and differentiates it by the
rows it computed. Gradients of parameters are therefore sums over the ranks of a group too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.config.errors import UserError
from burnish.models.decoder import Decoder, Layer
from burnish.models.kernels.shared_prefix import Attend, MaybeTensor
from burnish.training.parallel.fsdp import backbone_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def apply_sequence_parallel(model: nn.Module, group: ProcessGroup) -> None:
    """Have a model compute only this rank's rows of each micro-batch, from now on."""
    trunk, size = backbone_of(model), group.size()
    if not isinstance(trunk, Decoder):
        raise UserError("parallel.sequence needs the native decoder; this model runs through transformers")
    heads = cast(Layer, trunk.layers[0]).arch.num_heads
    if heads % size:
        raise UserError(
            f"parallel.sequence={size} does not divide the {heads} query heads (of one tensor-parallel rank)"
        )
    trunk.shard_rows = lambda num_rows, wanted: SequenceSlice(group, num_rows, wanted)


class SequenceSlice:
    """One micro-batch of `num_rows` rows, cut evenly; the last slices are filled up with rows of which nothing counts."""

    def __init__(self, group: ProcessGroup, num_rows: int, wanted: Tensor) -> None:
        self.group, self.num_rows = group, num_rows
        self.size, self.rank = group.size(), group.rank()
        self.each = math.ceil(num_rows / self.size)
        owner = wanted // self.each
        counts = torch.bincount(owner, minlength=self.size)
        self.width = max(1, int(counts.max()))
        # Where a wanted row's value stands when the values of all ranks lie one rank after the other, `width` for each.
        order = owner.argsort(stable=True)
        among = torch.empty_like(order)
        among[order] = torch.arange(order.shape[0], device=order.device) - (counts.cumsum(0) - counts)[owner[order]]
        self.place = owner * self.width + among
        self.chosen = (owner == self.rank).nonzero().squeeze(1)
        self.count = self.chosen.shape[0]
        if self.count:
            self.at = wanted[self.chosen] - self.rank * self.each
        else:  # a row of which nothing counts, so that gradients flow back here as everywhere
            self.chosen = self.at = torch.zeros(1, dtype=torch.long, device=wanted.device)

    def rows(self, column: Tensor) -> Tensor:
        """[U] to [each]."""
        return self._filled(column)[self.rank * self.each : (self.rank + 1) * self.each]

    def select_wanted(self, column: Tensor) -> Tensor:
        """[M] to [m]."""
        return column[self.chosen]

    def gather_wanted(self, values: MaybeTensor) -> MaybeTensor:
        """[m] to [M]."""
        if values is None:
            return values
        padded = functional.pad(values[: self.count], (0, self.width - self.count))
        return _AllGather.apply(padded, self.group)[self.place]

    def attention(self, attend: Attend) -> Attend:
        """Attention of all rows on this rank's share of the heads, between two exchanges."""

        def exchanged(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads, shared = q.shape[1] // self.size, math.lcm(k.shape[1], self.size) // k.shape[1]
            if shared > 1:
                k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
            parts = [x.unflatten(1, (self.size, -1)) for x in (q, k, v)]  # [each, ranks, heads of one, D]
            by_rank = torch.cat(parts, 2).transpose(0, 1).contiguous()
            here = _AllToAll.apply(by_rank, self.group).flatten(0, 1)[: self.num_rows]  # [U, heads of this rank, D]
            q, k, v = here.split([part.shape[2] for part in parts], 1)
            out = self._filled(attend(layer, q, k, v)).unflatten(0, (self.size, self.each)).contiguous()
            back = _AllToAll.apply(out, self.group)  # [ranks' heads, each, heads, D]
            return back.transpose(0, 1).reshape(self.each, self.size * heads, -1)

        return exchanged

    def _filled(self, column: Tensor) -> Tensor:
        """[U, ...] with rows of zeros up to `each` for every rank."""
        missing = self.size * self.each - column.shape[0]
        return torch.cat([column, column.new_zeros(missing, *column.shape[1:])]) if missing else column


class _AllToAll(torch.autograd.Function):
    """[ranks, ...]: entry j goes to rank j, what comes from rank j becomes entry j; the gradient goes the same way back."""

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
    """[width] to [ranks * width]. Every rank has the whole loss, so each takes the gradient of its own entries and no more."""

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
