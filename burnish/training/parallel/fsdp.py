"""Shards a model with FSDP2: each rank holds a shard of every parameter, its gradient and its optimizer state.

A layer's parameters are gathered when it computes and freed afterwards. Gradients are summed over ranks, never averaged, because
token weights were fixed on the whole mini-batch. On a mesh with a `replicate` dimension they are also summed over copies (HSDP).

Embedding, final norm and head form the outermost FSDP group. It stays gathered from forward to backward, because the head is used
after the decoder's `forward` has returned.

Half-precision parameters stay in half precision, with master weights in the optimizer, as in one process. Their gradients are
reduced in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from burnish.core.pipeline_stage import stage_of, whole_tensor, whole_tensors
from burnish.models.decoder import Decoder, Layer
from burnish.models.heads import ScoreModel, ValueModel
from burnish.models.nf4 import quantised_tensors
from burnish.models.weight_layout import in_hf_order, row_order_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def apply_fsdp(
    model: nn.Module, mesh: DeviceMesh, offload: bool = False, expert_mesh: DeviceMesh | None = None
) -> None:
    """Shard the parameters of a model over a mesh (`LearnerMesh.fsdp`), in place; parameter names stay.

    `expert_mesh` is that of experts which are divided over processes (`LearnerMesh.expert_fsdp`).

    Make the optimizer afterwards. The model may be on the CPU: it is moved to the rank's device layer by layer, so that no device
    ever holds all of it.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    on_gpu = mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()

    def shard(module: nn.Module, mesh: DeviceMesh = mesh, whole: nn.Parameter | None = None) -> None:
        is_half = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half else None)
        ignored = None if whole is None else {whole}
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=policy, ignored_params=ignored)

    backbone = backbone_of(model)
    for layer in layers_of(backbone):
        if expert_mesh is not None and isinstance(layer, Layer) and layer.experts is not None:
            for linear, method in ((layer.experts.gate_up, "from_tokens"), (layer.experts.down, "to_tokens")):
                shard(linear, expert_mesh)
                register_fsdp_forward_method(linear, method)
        shard(layer, whole=_wide_bias(layer, mesh.device_type))
    shard(backbone)
    if isinstance(model, ValueModel) and model.head is not None:  # wider than the rest, and an FSDP group has one type
        shard(model)
        register_fsdp_forward_method(model, "token_values")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _wide_bias(layer: nn.Module, device_type: str) -> nn.Parameter | None:
    """The bias of a router's choice in a layer of a half type, on the rank's device. It is float32, and an FSDP group has one type."""
    experts = layer.experts if isinstance(layer, Layer) else None
    if experts is None or not experts.shape.has_score_bias or experts.score_bias.dtype == experts.router.weight.dtype:
        return None
    if not experts.score_bias.is_meta:
        experts.score_bias.data = experts.score_bias.data.to(device_type)
    return experts.score_bias


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward left gathered: they would be stale after an update."""
    for module in (model, backbone_of(model)):
        reshard = cast("Callable[[], None] | None", getattr(module, "reshard", None))  # FSDP's method, if it is sharded
        if reshard is not None:
            reshard()


def backbone_of(model: nn.Module) -> nn.Module:
    """The module whose `forward` computes all layers."""
    if isinstance(model, ValueModel | ScoreModel):
        model = model.backbone
    return model if isinstance(model, Decoder) else cast(nn.Module, model.inner)


def layers_of(backbone: nn.Module) -> nn.ModuleList:
    """The layers of a decoder: of transformers', its longest list of modules."""
    if isinstance(backbone, Decoder):
        return backbone.layers
    lists = [module for module in backbone.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


@torch.no_grad()
def full_parameters(model: nn.Module, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """All parameters, or those in `names`, gathered one at a time, with rows in Hugging Face's order. Every rank must iterate.

    An unsharded model yields its own tensors. Gathered tensors are new, and are freed when the next one is requested. A model that is
    divided into stages yields the parameters of all stages.
    """
    reshard(model)
    backbone, parameters, stage = backbone_of(model), dict(model.named_parameters()), stage_of(model)
    for name in parameter_names(model):
        if names is None or name in names:
            full = whole_tensor(name, parameters, stage)
            yield name, in_hf_order(full, row_order_of(backbone, name)) if isinstance(backbone, Decoder) else full


def full_quantised_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of 4-bit matrices, of all stages. Every rank must iterate; nothing shards them but a pipeline."""
    own, stage = quantised_tensors(model), stage_of(model)
    names = own if stage is None else [name for name in stage.tensors if name not in parameter_names(model)]
    yield from whole_tensors(names, own, stage)


def parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters of a whole model, in its order, on any stage."""
    stage = stage_of(model)
    if stage is None:
        return [name for name, _ in model.named_parameters()]
    return [name for name, tensor in stage.tensors.items() if tensor.is_parameter]
