"""FSDP2: every rank holds a piece of each parameter, its gradient and its optimizer state.

A layer's parameters are gathered when it computes and dropped after; gradients are summed over ranks into pieces, never
averaged, since token weights were fixed on the whole mini-batch. Embedding, final norm and head form the outermost group,
which stays gathered from forward to backward: the head is used after the decoder's `forward` has returned. With a
`replicate` dimension of more than one the pieces are summed over the copies too (HSDP).

Half-type parameters stay half here, with their master copies in the optimizer, as in one process; their gradients are
summed over ranks in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from burnish.core.sharded_tensors import full_tensor
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel
from burnish.models.weight_layout import in_hf_order, row_order_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from burnish.training.parallel.ranks import Ranks


def apply_fsdp(model: nn.Module, ranks: Ranks, offload: bool = False) -> None:
    """Cut the parameters of a model over ranks, in place; names stay. Its optimizer must be made afterwards.

    A model may come on the CPU: layer by layer it is moved to where the rank computes, so no device ever holds it whole.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    assert ranks.weights is not None, "one process alone has nothing to cut"
    mesh = _shard_mesh(ranks.weights)
    on_gpu = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()

    def cut(module: nn.Module) -> None:
        half = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=policy)

    trunk = backbone_of(model)
    for layer in layers_of(trunk):
        cut(layer)
    cut(trunk)
    if isinstance(model, ValueModel):  # its scalar head has a wider type, so it is a group of its own
        cut(model)
        register_fsdp_forward_method(model, "token_values")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Drop what a forward pass without a backward has left gathered: it would be out of date after a change of weights."""
    for module in (model, backbone_of(model)):
        reshard = cast("Callable[[], None] | None", getattr(module, "reshard", None))  # FSDP's, where it is cut
        if reshard is not None:
            reshard()


def backbone_of(model: nn.Module) -> nn.Module:
    """The module whose `forward` is called to compute all layers."""
    if isinstance(model, ValueModel):
        model = model.backbone
    return model if isinstance(model, Decoder) else cast(nn.Module, model.inner)


def layers_of(trunk: nn.Module) -> nn.ModuleList:
    """The layers of a decoder, ours or transformers': its longest list of modules."""
    lists = [module for module in trunk.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def _shard_mesh(weights: DeviceMesh) -> DeviceMesh:
    """The dimensions parameters are cut over; a single copy needs no sum over copies."""
    return weights["replicate", "shard"] if weights["replicate"].size() > 1 else weights["shard"]


# --- Whole parameters out of a model that is cut over ranks, for engines and exports.


@torch.no_grad()
def full_parameters(model: nn.Module, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, or those of some names, whole and with its rows in the usual order, one at a time; all ranks must go
    through it.

    Tensors of a model that is not cut are its own; others are new, and are freed when the next is asked for.
    """
    reshard(model)
    trunk = backbone_of(model)
    wanted = [(name, parameter) for name, parameter in model.named_parameters() if names is None or name in names]
    for name, parameter in wanted:
        whole = full_tensor(parameter)
        yield name, in_hf_order(whole, row_order_of(trunk, name)) if isinstance(trunk, Decoder) else whole
