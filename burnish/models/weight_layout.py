"""How Hugging Face's linear layers map to rows of our fused matrices, and the row order of tensor-parallel models.

Query, key and value are one matrix, as are gate and up. A tensor-parallel rank (`training/parallel/tensor_parallel.py`)
needs its rows of each to be contiguous. Such a model therefore has its rows in another order: all rows of the first rank, then
all of the second. Code that reads weights of such a model restores Hugging Face's order (`in_hf_order`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, Layer
from burnish.models.expert_shape import ExpertShape
from burnish.models.model_families import FAMILIES
from burnish.models.vision.tensor_names import TOWER

FUSED_MODULES = ("qkv", "gate_up")
RowOrder = Callable[[str], "Tensor | None"]
"""Parameter name -> order of its rows; None is Hugging Face's order."""


@dataclass(frozen=True)
class Projection:
    """Hugging Face's linear layer `path` is rows [start, stop) of our layer's matrix `module`."""

    name: str
    path: str
    module: str
    start: int
    stop: int
    num_inputs: int

    @property
    def num_outputs(self) -> int:
        return self.stop - self.start


def layer_matrices(arch: Architecture, layer: int) -> tuple[str, ...]:
    """The names of a layer's matrices in the order of the forward pass, without the router, which is neither quantised nor adapted."""
    experts = ("experts.gate_up", "experts.down") if arch.has_experts(layer) else ()
    return (*arch.attention_matrices, *experts, *(("gate_up", "down") if arch.dense_size(layer) else ()))


def dense_mlp_name(arch: Architecture, layer: int) -> str:
    """Hugging Face's name of the MLP of a layer that computes every token."""
    names = FAMILIES[arch.family].expert_names
    return names.shared if names is not None and arch.has_experts(layer) else "mlp"


def replace_module(layer: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule `name` of a layer, such as `experts.down`."""
    owner, _, attribute = name.rpartition(".")
    setattr(layer.get_submodule(owner), attribute, module)


def _attention_projections(arch: Architecture) -> list[Projection]:
    hidden, latent = arch.hidden_size, arch.latent
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    out = Projection("o_proj", "self_attn.o_proj", "out", 0, hidden, arch.num_heads * arch.value_dim)
    if latent is None:
        return [
            Projection("q_proj", "self_attn.q_proj", "qkv", 0, q, hidden),
            Projection("k_proj", "self_attn.k_proj", "qkv", q, q + kv, hidden),
            Projection("v_proj", "self_attn.v_proj", "qkv", q + kv, q + 2 * kv, hidden),
            out,
        ]
    rank, kv_width = latent.query_rank, arch.num_heads * (latent.nope_dim + latent.value_dim)
    kv_down = ("kv_a_proj_with_mqa", "self_attn.kv_a_proj_with_mqa", "qkv.latent", rank or 0, latent.latent_size)
    queries = [Projection("q_proj", "self_attn.q_proj", "qkv.q_up", 0, q, hidden)]
    if rank is not None:
        queries = [Projection("q_b_proj", "self_attn.q_b_proj", "qkv.q_up", 0, q, rank)]
    return [
        *([] if rank is None else [Projection("q_a_proj", "self_attn.q_a_proj", "qkv.latent", 0, rank, hidden)]),
        Projection(*kv_down, hidden),
        *queries,
        Projection("kv_b_proj", "self_attn.kv_b_proj", "qkv.kv_up", 0, kv_width, latent.rank),
        out,
    ]


def projections(arch: Architecture, layer: int = 0) -> list[Projection]:
    """The projections of one decoder layer, in the order of the forward pass; each expert has three."""
    hidden, size, path = arch.hidden_size, arch.dense_size(layer), dense_mlp_name(arch, layer)
    found = _attention_projections(arch) + (_expert_projections(arch) if arch.has_experts(layer) else [])
    if not size:
        return found
    return [
        *found,
        Projection("gate_proj", f"{path}.gate_proj", "gate_up", 0, size, hidden),
        Projection("up_proj", f"{path}.up_proj", "gate_up", size, 2 * size, hidden),
        Projection("down_proj", f"{path}.down_proj", "down", 0, hidden, size),
    ]


def _expert_projections(arch: Architecture) -> list[Projection]:
    shape, names = arch.experts, FAMILIES[arch.family].expert_names
    assert shape is not None
    assert names is not None, f"family {arch.family} has names for its experts"
    hidden, size, found = arch.hidden_size, shape.expert_size, []
    for e in range(shape.num_experts):
        row, module = 2 * e * size, "experts.gate_up"
        found.append(Projection("gate_proj", names.gate.format(e), module, row, row + size, hidden))
        found.append(Projection("up_proj", names.up.format(e), module, row + size, row + 2 * size, hidden))
    for e in range(shape.num_experts):
        row = e * hidden
        found.append(Projection("down_proj", names.down.format(e), "experts.down", row, row + hidden, size))
    return found


def lora_targets(arch: Architecture, lora: Lora, layer: int = 0) -> list[Projection]:
    """The projections of one decoder layer that have an adapter."""
    found = [projection for projection in projections(arch, layer) if projection.name in lora.projections]
    missing = [] if lora.targets == "all-linear" else [t for t in lora.targets if all(t != p.name for p in found)]
    if missing:
        names = dict.fromkeys(projection.name for projection in projections(arch, layer))
        raise UserError(
            f"model.lora.targets: a {arch.family} model has no {missing[0]}; its projections are {', '.join(names)}"
        )
    return found


def num_lora_parameters(arch: Architecture, lora: Lora) -> int:
    """Number of adapter parameters: A [rank, in] and B [out, rank] for each target of each layer."""
    targets = (target for layer in range(arch.num_layers) for target in lora_targets(arch, lora, layer))
    return lora.rank * sum(target.num_inputs + target.num_outputs for target in targets)


def fused_row_counts(arch: Architecture, module: str) -> tuple[int, ...]:
    """Rows of each matrix within a fused matrix."""
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return (q, kv, kv) if module == "qkv" else (arch.mlp_size, arch.mlp_size)


def row_order(sizes: tuple[int, ...], parts: int) -> Tensor:
    """Row order in which each part's rows of all matrices are contiguous: row i of the result is row order[i]."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    blocks = [
        torch.arange(start + part * size // parts, start + (part + 1) * size // parts)
        for part in range(parts)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return torch.cat(blocks)


def expert_row_order(shape: ExpertShape, num_ranks: int, parts: int) -> Tensor:
    """Row order of `experts.gate_up`: within the experts of each of `num_ranks` ranks, each part's rows are contiguous."""
    counts = (shape.expert_size,) * (2 * shape.num_experts // num_ranks)
    order = row_order(counts, parts)
    return torch.cat([order + rank * sum(counts) for rank in range(num_ranks)])


def tensor_parallel_size(model: Decoder) -> int:
    """The number of tensor-parallel parts; each layer has the architecture of its own part."""
    return model.arch.num_heads // cast(Layer, model.layers[0]).arch.num_heads


def row_order_of(model: Decoder, name: str) -> Tensor | None:
    """The row order of a parameter of a model; None if it is Hugging Face's."""
    parts, (module, kind) = tensor_parallel_size(model), ("", *name.split("."))[-2:]  # latent attention has one part
    if parts == 1 or module not in FUSED_MODULES or kind == "lora_a" or name.startswith(TOWER):
        return None
    if ".experts." in name:
        assert model.arch.experts is not None, "a model with experts"
        return expert_row_order(model.arch.experts, model.expert_ranks, parts)
    if kind != "lora_b":
        return row_order(fused_row_counts(model.arch, module), parts)
    assert model.lora is not None, "a model with adapters"
    return row_order(tuple(t.num_outputs for t in lora_targets(model.arch, model.lora) if t.module == module), parts)


def in_hf_order(whole: Tensor, order: Tensor | None) -> Tensor:
    """A whole parameter with its rows in Hugging Face's order, given the order that they have."""
    return whole if order is None else whole[order.argsort().to(whole.device)]
