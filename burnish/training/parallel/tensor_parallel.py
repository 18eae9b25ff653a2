"""Tensor parallelism: the ranks of a group cut the heads and the MLP of every layer among them (Megatron, 1909.08053).

A rank has some query heads with the key/value heads they read, and some columns of the MLP; it computes its part of a
layer's output from the whole input, and the parts are summed. That is two sums over the group in each layer, forward and
backward. Embedding, norms and head are whole on every rank. The rows of fused matrices are put into another order before
the cut (`models/weight_layout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.core.sharded_tensors import is_dtensor, local_tensor
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, Layer
from burnish.models.lora.adapters import LoraLinear, Span
from burnish.models.nf4 import quantised_weights
from burnish.models.weight_layout import FUSED_MODULES, fused_row_counts, row_order
from burnish.training.parallel.fsdp import backbone_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# --- Layers with adapters, cut over the ranks of a tensor-parallel group (`parallel/tensor.py` says how layers are).
#
# A fused layer is cut by its outputs: each rank has its rows of W and of the B's, and all of A. A layer behind it is cut by its
# inputs: columns of W and of A, and all of B.
#
#     by outputs    y_r = W_r x + scale B_r (A x)                 the gradients of x and A are sums over the ranks
#     by inputs     y = sum over ranks of W_r x_r + scale B (A_r x_r)      so is the gradient of B
#
# The arithmetic of one rank is that of the whole layer on smaller matrices.

PARTIAL_ADAPTER_GRADIENTS = ("qkv.lora_a", "gate_up.lora_a", "out.lora_b", "down.lora_b")
"""Parameters that every rank has whole, and a part of whose gradient it computes."""


class TensorParallelLoraLinear(LoraLinear):
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
                tensor = _sharded_parameter(tensor, mesh, 0 if self.by_outputs else 1)
            self.register_parameter(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [N, in] that every rank has, or its columns of them, to its columns of [N, out], or to all of them."""
        weight, bias, a, b = (_local_part(t) for t in (self.weight, self.bias, self.lora_a, self.lora_b))
        if self.by_outputs:
            return self.product(cast(Tensor, _CopyToTensorParallel.apply(x, self.group)), weight, bias, a, b)
        y = cast(Tensor, _ReduceFromTensorParallel.apply(self.product(x, weight, None, a, b), self.group))
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


def _sharded_parameter(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    # Every rank has the same numbers: nothing needs to be sent.
    spread = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


def _local_part(tensor: Any) -> Any:
    """This rank's part of a parameter, to be differentiated by."""
    return tensor.to_local() if isinstance(tensor, Tensor) and is_dtensor(tensor) else tensor


class _ReduceFromTensorParallel(torch.autograd.Function):
    """The sum over ranks, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _CopyToTensorParallel(torch.autograd.Function):
    """What every rank has, of whose gradient each computes a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_reduced(grads[0], ctx.group), None


def _all_reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    from torch.distributed import all_reduce

    found = x.clone(memory_format=torch.contiguous_format)
    all_reduce(found, group=group)
    return found


ROWWISE = ("out", "down")
"""The matrices that follow the fused ones: those are cut by their outputs, so these by their inputs."""
PARTIAL_GRADIENTS = ("q_norm.weight", "k_norm.weight")
"""Parameters that every rank has whole and uses on its own heads alone, so that gradients are sums over the group."""


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the layers of a whole model over a one-dimensional mesh, in place. Before FSDP, if both are wanted."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    trunk, parts = backbone_of(model), mesh.size()
    if not isinstance(trunk, Decoder):
        raise UserError("parallel.tensor needs the native decoder; this model runs through transformers")
    check_divisible(trunk.arch, parts)
    if quantised_weights(trunk):
        raise UserError("parallel.tensor cannot cut matrices in 4 bits: use parallel.shard, or model.lora.base=dtype")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in FUSED_MODULES}
    plan |= {name: RowwiseParallel() for name in ROWWISE}
    for layer in cast("list[Layer]", trunk.layers):
        for name in FUSED_MODULES:
            _reorder_rows(getattr(layer, name), row_order(fused_row_counts(trunk.arch, name), parts))
        adapted = [name for name in plan if isinstance(getattr(layer, name), LoraLinear)]
        for name in adapted:
            if name in FUSED_MODULES:
                reorder_adapters(getattr(layer, name), parts)
            sizes = fused_row_counts(trunk.arch, name) if name in FUSED_MODULES else None
            setattr(layer, name, TensorParallelLoraLinear(getattr(layer, name), sizes, mesh))
        parallelize_module(layer, mesh, {name: style for name, style in plan.items() if name not in adapted})
        layer.arch = local_architecture(trunk.arch, parts)


def check_divisible(arch: Architecture, parts: int) -> None:
    """Whether so many ranks can have the same number of heads and MLP columns each."""
    sizes = {"query heads": arch.num_heads, "key/value heads": arch.num_kv_heads, "MLP columns": arch.mlp_size}
    for what, size in sizes.items():
        if size % parts:
            raise UserError(f"parallel.tensor={parts} does not divide the model's {size} {what}")


def local_architecture(arch: Architecture, parts: int) -> Architecture:
    """What one rank's part of a layer looks like."""
    heads, kv_heads, mlp = (size // parts for size in (arch.num_heads, arch.num_kv_heads, arch.mlp_size))
    return replace(arch, num_heads=heads, num_kv_heads=kv_heads, mlp_size=mlp)


def reduce_partial_gradients(gradients: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Sum, in place, the gradients of `PARTIAL` parameters over the group."""
    from torch.distributed import all_reduce

    for name, gradient in gradients.items():
        if name.endswith((*PARTIAL_GRADIENTS, *PARTIAL_ADAPTER_GRADIENTS)):
            all_reduce(local_tensor(gradient), group=mesh.get_group())


@torch.no_grad()
def _reorder_rows(linear: nn.Linear, order: Tensor) -> None:
    # New tensors: those below adapters may be another model's too, which puts them in order itself.
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if name in ("weight", "bias"):
            ordered = parameter[order.to(parameter.device)]
            setattr(linear, name, nn.Parameter(ordered, requires_grad=parameter.requires_grad))
