"""Tensor parallelism: the ranks of a group cut the heads and the MLP of every layer among them (Megatron, 1909.08053).

A rank has some query heads with the key/value heads they read, and some columns of the MLP; it computes its part of a
layer's output from the whole input, and the parts are summed. That is two sums over the group in each layer, forward and
backward. Embedding, norms and head are whole on every rank. The rows of fused matrices are put into another order before
the cut (`models/row_order.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.core.local import local
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, Layer
from burnish.models.four_bits import quantised_weights
from burnish.models.ops.lora import LoraLinear
from burnish.models.row_order import FUSED, heights, row_order
from burnish.training.parallel.shard import trunk_of
from burnish.training.parallel.tensor_lora import PARTIAL as PARTIAL_OF_ADAPTERS
from burnish.training.parallel.tensor_lora import CutLoraLinear, reorder_adapters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BY_COLUMNS = ("out", "down")
"""The matrices that follow the fused ones: those are cut by their outputs, so these by their inputs."""
PARTIAL = ("q_norm.weight", "k_norm.weight")
"""Parameters that every rank has whole and uses on its own heads alone, so that gradients are sums over the group."""


def cut_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the layers of a whole model over a one-dimensional mesh, in place. Before FSDP, if both are wanted."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    trunk, parts = trunk_of(model), mesh.size()
    if not isinstance(trunk, Decoder):
        raise UserError("parallel.tensor needs the native decoder; this model runs through transformers")
    check(trunk.arch, parts)
    if quantised_weights(trunk):
        raise UserError("parallel.tensor cannot cut matrices in 4 bits: use parallel.shard, or model.lora.base=dtype")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in FUSED}
    plan |= {name: RowwiseParallel() for name in BY_COLUMNS}
    for layer in cast("list[Layer]", trunk.layers):
        for name in FUSED:
            _reorder(getattr(layer, name), row_order(heights(trunk.arch, name), parts))
        adapted = [name for name in plan if isinstance(getattr(layer, name), LoraLinear)]
        for name in adapted:
            if name in FUSED:
                reorder_adapters(getattr(layer, name), parts)
            sizes = heights(trunk.arch, name) if name in FUSED else None
            setattr(layer, name, CutLoraLinear(getattr(layer, name), sizes, mesh))
        parallelize_module(layer, mesh, {name: style for name, style in plan.items() if name not in adapted})
        layer.arch = part_of(trunk.arch, parts)


def check(arch: Architecture, parts: int) -> None:
    """Whether so many ranks can have the same number of heads and MLP columns each."""
    sizes = {"query heads": arch.num_heads, "key/value heads": arch.num_kv_heads, "MLP columns": arch.mlp_size}
    for what, size in sizes.items():
        if size % parts:
            raise UserError(f"parallel.tensor={parts} does not divide the model's {size} {what}")


def part_of(arch: Architecture, parts: int) -> Architecture:
    """What one rank's part of a layer looks like."""
    heads, kv_heads, mlp = (size // parts for size in (arch.num_heads, arch.num_kv_heads, arch.mlp_size))
    return replace(arch, num_heads=heads, num_kv_heads=kv_heads, mlp_size=mlp)


def sum_partial(gradients: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Sum, in place, the gradients of `PARTIAL` parameters over the group."""
    from torch.distributed import all_reduce

    for name, gradient in gradients.items():
        if name.endswith((*PARTIAL, *PARTIAL_OF_ADAPTERS)):
            all_reduce(local(gradient), group=mesh.get_group())


@torch.no_grad()
def _reorder(linear: nn.Linear, order: Tensor) -> None:
    # New tensors: those below adapters may be another model's too, which puts them in order itself.
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if name in ("weight", "bias"):
            ordered = parameter[order.to(parameter.device)]
            setattr(linear, name, nn.Parameter(ordered, requires_grad=parameter.requires_grad))
