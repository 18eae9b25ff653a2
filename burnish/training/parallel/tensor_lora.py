"""Layers with adapters, cut over the ranks of a tensor-parallel group (`parallel/tensor.py` says how layers are).

A fused layer is cut by its outputs: each rank has its rows of W and of the B's, and all of A. A layer behind it is cut by its
inputs: columns of W and of A, and all of B.

    by outputs    y_r = W_r x + scale B_r (A x)                 the gradients of x and A are sums over the ranks
    by inputs     y = sum over ranks of W_r x_r + scale B (A_r x_r)      so is the gradient of B

The arithmetic of one rank is that of the whole layer on smaller matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from burnish.core.local import is_spread
from burnish.models.ops.lora import LoraLinear, Span
from burnish.models.row_order import row_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

PARTIAL = ("qkv.lora_a", "gate_up.lora_a", "out.lora_b", "down.lora_b")
"""Parameters that every rank has whole, and a part of whose gradient it computes."""


class CutLoraLinear(LoraLinear):
    """One rank's part of a layer with adapters, whose rows are in the order of the cut already.

    `heights` are those of the matrices a fused layer consists of; None for a layer that is cut by its inputs.
    """

    def __init__(self, whole: LoraLinear, heights: tuple[int, ...] | None, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.rank, self.scale, self.is_on = whole.rank, whole.scale, whole.is_on
        self.by_outputs, self.group = heights is not None, mesh.get_group()
        self.spans = whole.spans if heights is None else local_spans(whole.spans, heights, mesh.size())
        cut = ("weight", "bias", "lora_b") if self.by_outputs else ("weight", "lora_a")
        for name in ("weight", "bias", "lora_a", "lora_b"):
            tensor = cast("nn.Parameter | None", getattr(whole, name))
            if name in cut and tensor is not None:
                tensor = _spread(tensor, mesh, 0 if self.by_outputs else 1)
            self.register_parameter(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [N, in] that every rank has, or its columns of them, to its columns of [N, out], or to all of them."""
        weight, bias, a, b = (_here(t) for t in (self.weight, self.bias, self.lora_a, self.lora_b))
        if self.by_outputs:
            return self.product(cast(Tensor, _SumGradients.apply(x, self.group)), weight, bias, a, b)
        y = cast(Tensor, _Sum.apply(self.product(x, weight, None, a, b), self.group))
        return y if bias is None else y + bias


def local_spans(spans: tuple[Span, ...], heights: tuple[int, ...], parts: int) -> tuple[Span, ...]:
    """Where the outputs of each adapter stand among those of one of so many ranks."""
    borders = {sum(heights[:k]) for k in range(len(heights) + 1)}
    assert all({*span} <= borders for span in spans), "an adapter is of one matrix, or of some that stand together"
    return tuple((start // parts, stop // parts) for start, stop in spans)


@torch.no_grad()
def reorder_adapters(linear: LoraLinear, parts: int) -> None:
    """Have the rows of a fused layer's B's in the order of the cut."""
    order = row_order(tuple(stop - start for start, stop in linear.spans), parts)
    linear.lora_b.copy_(linear.lora_b[order.to(linear.lora_b.device)])


def _spread(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    # Every rank has the same numbers: nothing needs to be sent.
    spread = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


def _here(tensor: Any) -> Any:
    """This rank's part of a parameter, to be differentiated by."""
    return tensor.to_local() if isinstance(tensor, Tensor) and is_spread(tensor) else tensor


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _SumGradients(torch.autograd.Function):
    """What every rank has, of whose gradient each computes a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _summed(grads[0], ctx.group), None


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    from torch.distributed import all_reduce

    found = x.clone(memory_format=torch.contiguous_format)
    all_reduce(found, group=group)
    return found
