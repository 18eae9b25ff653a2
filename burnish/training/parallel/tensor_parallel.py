"""Tensor parallelism: the ranks of a group divide the attention heads and the MLP of every layer (Megatron, 1909.08053).

A rank has some query heads with the key/value heads they read, and some columns of the MLP. It computes its part of a layer's
output from the whole input, and the parts are summed: two all-reduces per layer, forward and backward. Embedding, norms and head
are whole on every rank. The rows of fused matrices are reordered before they are divided (`models/weight_layout.py`).

With LoRA, a fused layer is divided by its outputs: a rank has its rows of W and of the B matrices, and all of A. The layer that
follows it is divided by its inputs: a rank has columns of W and of A, and all of B.

    by outputs    y_r = W_r x + scale B_r (A x)                             gradients of x and A are sums over the ranks
    by inputs     y = sum over ranks of W_r x_r + scale B (A_r x_r)         so is the gradient of B
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

ROWWISE = ("out", "down")
"""The matrices after the fused ones. The fused ones are divided by their outputs, so these are divided by their inputs."""
PARTIAL_GRADIENTS = ("q_norm.weight", "k_norm.weight")
"""Parameters that every rank has whole and applies to its own heads only, so that their gradients must be summed."""
PARTIAL_ADAPTER_GRADIENTS = ("qkv.lora_a", "gate_up.lora_a", "out.lora_b", "down.lora_b")
"""Adapter matrices that every rank has whole, with a gradient that must be summed."""


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the layers of a whole model over a one-dimensional mesh, in place. Call it before FSDP if both are used."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    backbone, num_ranks = backbone_of(model), mesh.size()
    if not isinstance(backbone, Decoder):
        raise UserError("parallel.tensor needs the native decoder; this model runs through transformers")
    check_divisible(backbone.arch, num_ranks)
    if quantised_weights(backbone):
        raise UserError("parallel.tensor cannot cut matrices in 4 bits: use parallel.data, or model.lora.base=dtype")
    whole_plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in FUSED_MODULES}
    whole_plan |= {name: RowwiseParallel() for name in ROWWISE}
    for layer in cast("list[Layer]", backbone.layers):
        # `expert_parallel.py` divides experts.
        plan = {name: style for name, style in whole_plan.items() if layer.experts is None or name in ("qkv", "out")}
        for name in (name for name in FUSED_MODULES if name in plan):
            _reorder_rows(getattr(layer, name), row_order(fused_row_counts(backbone.arch, name), num_ranks))
        adapted = [name for name in plan if isinstance(getattr(layer, name), LoraLinear)]
        for name in adapted:
            if name in FUSED_MODULES:
                reorder_adapters(getattr(layer, name), num_ranks)
            row_counts = fused_row_counts(backbone.arch, name) if name in FUSED_MODULES else None
            setattr(layer, name, TensorParallelLoraLinear(getattr(layer, name), row_counts, mesh))
        parallelize_module(layer, mesh, {name: style for name, style in plan.items() if name not in adapted})
        layer.arch = local_architecture(backbone.arch, num_ranks)


def check_divisible(arch: Architecture, num_ranks: int) -> None:
    """Refuse an architecture that several ranks cannot divide into equal numbers of heads and MLP columns."""
    if num_ranks == 1:
        return
    if arch.latent is not None:
        raise UserError("parallel.tensor does not divide latent attention yet: use parallel.data or parallel.context")
    sizes = {"query heads": arch.num_heads, "key/value heads": arch.num_kv_heads, "MLP columns": arch.mlp_size}
    for what, size in sizes.items():
        if size % num_ranks:
            raise UserError(f"parallel.tensor={num_ranks} does not divide the model's {size} {what}")
    if arch.wide_qk_norm:
        raise UserError("parallel.tensor does not divide norms over all heads: use parallel.data")


def local_architecture(arch: Architecture, num_ranks: int) -> Architecture:
    """The shape of one rank's part of a layer."""
    heads, kv_heads, mlp = (size // num_ranks for size in (arch.num_heads, arch.num_kv_heads, arch.mlp_size))
    return replace(arch, num_heads=heads, num_kv_heads=kv_heads, mlp_size=mlp)


def reduce_partial_gradients(gradients: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Sum the gradients of `PARTIAL_GRADIENTS` and `PARTIAL_ADAPTER_GRADIENTS` over the group, in place."""
    from torch.distributed import all_reduce

    for name, gradient in gradients.items():
        if name.endswith((*PARTIAL_GRADIENTS, *PARTIAL_ADAPTER_GRADIENTS)):
            all_reduce(local_tensor(gradient), group=mesh.get_group())


class TensorParallelLoraLinear(LoraLinear):
    """One rank's part of a layer with adapters, whose rows were already reordered.

    `row_counts` are those of the matrices in a fused layer; None for a layer that is divided by its inputs.
    """

    def __init__(self, whole: LoraLinear, row_counts: tuple[int, ...] | None, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.rank, self.scale, self.is_on = whole.rank, whole.scale, whole.is_on
        self.by_outputs, self.group = row_counts is not None, mesh.get_group()
        self.spans = whole.spans if row_counts is None else local_spans(whole.spans, row_counts, mesh.size())
        divided = ("weight", "bias", "lora_b") if self.by_outputs else ("weight", "lora_a")
        for name in ("weight", "bias", "lora_a", "lora_b"):
            tensor = cast("nn.Parameter | None", getattr(whole, name))
            if name in divided and tensor is not None:
                tensor = _sharded_parameter(tensor, mesh, 0 if self.by_outputs else 1)
            self.register_parameter(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """By outputs: whole rows [N, in] to this rank's columns of [N, out]. By inputs: its columns of x to whole rows [N, out]."""
        weight, bias, a, b = (_local_part(t) for t in (self.weight, self.bias, self.lora_a, self.lora_b))
        if self.by_outputs:
            return self.product(copy_to_tensor_parallel(x, self.group), weight, bias, a, b)
        y = reduce_from_tensor_parallel(self.product(x, weight, None, a, b), self.group)
        return y if bias is None else y + bias


def local_spans(spans: tuple[Span, ...], row_counts: tuple[int, ...], num_ranks: int) -> tuple[Span, ...]:
    """Each adapter's range among the outputs of one rank."""
    borders = {sum(row_counts[:k]) for k in range(len(row_counts) + 1)}
    assert all({*span} <= borders for span in spans), "an adapter covers one fused matrix, or several adjacent ones"
    return tuple((start // num_ranks, stop // num_ranks) for start, stop in spans)


@torch.no_grad()
def reorder_adapters(linear: LoraLinear, num_ranks: int) -> None:
    """Reorder the rows of a fused layer's B matrices, so that each rank's rows are contiguous."""
    order = row_order(tuple(stop - start for start, stop in linear.spans), num_ranks)
    linear.lora_b.copy_(linear.lora_b[order.to(linear.lora_b.device)])


@torch.no_grad()
def _reorder_rows(linear: nn.Linear, order: Tensor) -> None:
    # New tensors, not in place: another model may share frozen weights with this one, and reorders them itself.
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if name in ("weight", "bias"):
            ordered = parameter[order.to(parameter.device)]
            setattr(linear, name, nn.Parameter(ordered, requires_grad=parameter.requires_grad))


def _sharded_parameter(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    # Every rank has the same values, so src_data_rank=None sends nothing.
    sharded = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _local_part(tensor: Any) -> Any:
    """This rank's part of a parameter, with gradient."""
    return tensor.to_local() if isinstance(tensor, Tensor) and is_dtensor(tensor) else tensor


def reduce_from_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks of parts of an output."""
    return cast(Tensor, _ReduceFromTensorParallel.apply(x, group))


def copy_to_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """An input that every rank has, of which each computes a part of the gradient."""
    return cast(Tensor, _CopyToTensorParallel.apply(x, group))


class _ReduceFromTensorParallel(torch.autograd.Function):
    """All-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _CopyToTensorParallel(torch.autograd.Function):
    """Identity in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_reduced(grads[0], ctx.group), None


def _all_reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    from torch.distributed import all_reduce

    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=group)
    return total
