"""The linear layers of a decoder as Hugging Face names them, and where they stand in ours, which are fused. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from burnish.config.model import Lora
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, Layer


@dataclass(frozen=True)
class Projection:
    """Rows [start, stop) of the matrix `module` of our layer are Hugging Face's `path`."""

    name: str
    path: str
    module: str
    start: int
    stop: int
    num_inputs: int

    @property
    def num_outputs(self) -> int:
        return self.stop - self.start


def projections(arch: Architecture) -> list[Projection]:
    """Those of one decoder layer, in the order of the forward pass."""
    hidden, mlp = arch.hidden_size, arch.mlp_size
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return [
        Projection("q_proj", "self_attn.q_proj", "qkv", 0, q, hidden),
        Projection("k_proj", "self_attn.k_proj", "qkv", q, q + kv, hidden),
        Projection("v_proj", "self_attn.v_proj", "qkv", q + kv, q + 2 * kv, hidden),
        Projection("o_proj", "self_attn.o_proj", "out", 0, hidden, q),
        Projection("gate_proj", "mlp.gate_proj", "gate_up", 0, mlp, hidden),
        Projection("up_proj", "mlp.up_proj", "gate_up", mlp, 2 * mlp, hidden),
        Projection("down_proj", "mlp.down_proj", "down", 0, hidden, mlp),
    ]


def lora_targets(arch: Architecture, lora: Lora) -> list[Projection]:
    """The projections of one decoder layer that have an adapter."""
    return [projection for projection in projections(arch) if projection.name in lora.projections]


def num_lora_parameters(arch: Architecture, lora: Lora) -> int:
    """Parameters of the adapters: an A [rank, in] and a B [out, rank] for each target of each layer."""
    widths = sum(projection.num_inputs + projection.num_outputs for projection in lora_targets(arch, lora))
    return arch.num_layers * lora.rank * widths


# --- The order of rows in matrices that hold several, when each of a number of ranks shall have one block of rows.
#
# Query, key and value rows are one matrix here, as are gate and up. A rank with some heads needs its rows of each to stand
# together, so a model whose layers are cut (`training/parallel/tensor_parallel.py`) has them in another order than usual: all
# of the first rank, then all of the second. Whoever takes weights out of such a model puts them back.

FUSED_MODULES = ("qkv", "gate_up")
RowOrder = Callable[[str], "Tensor | None"]
"""Of a parameter's name: the order its rows have; None is the usual one."""


def fused_row_counts(arch: Architecture, module: str) -> tuple[int, ...]:
    """Rows of each matrix that a fused one holds."""
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return (q, kv, kv) if module == "qkv" else (arch.mlp_size, arch.mlp_size)


def row_order(sizes: tuple[int, ...], parts: int) -> Tensor:
    """Which row stands where when each part's rows of every matrix stand together: row i of the result is row order[i]."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    blocks = [
        torch.arange(start + part * size // parts, start + (part + 1) * size // parts)
        for part in range(parts)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return torch.cat(blocks)


def tensor_parallel_size(model: Decoder) -> int:
    """Into how many parts the layers of a model are cut: each knows the architecture of its own part."""
    return model.arch.num_heads // cast(Layer, model.layers[0]).arch.num_heads


def row_order_of(model: Decoder, name: str) -> Tensor | None:
    """The order that the rows of a parameter have in a model; None where it is the usual one."""
    parts, (module, kind) = tensor_parallel_size(model), ("", *name.split("."))[-2:]
    if parts == 1 or module not in FUSED_MODULES or kind == "lora_a":
        return None
    if kind != "lora_b":
        return row_order(fused_row_counts(model.arch, module), parts)
    assert model.lora is not None, "a model with adapters"
    return row_order(tuple(t.num_outputs for t in lora_targets(model.arch, model.lora) if t.module == module), parts)


def in_hf_order(whole: Tensor, order: Tensor | None) -> Tensor:
    """A whole parameter with its rows in the usual order, given the one they have."""
    return whole if order is None else whole[order.argsort().to(whole.device)]
