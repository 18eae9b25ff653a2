"""The linear layers of a decoder as Hugging Face names them, and where they stand in ours, which are fused. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.lora import Lora
from burnish.models.architecture import Architecture


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


def targets(arch: Architecture, lora: Lora) -> list[Projection]:
    """The projections of one decoder layer that have an adapter."""
    return [projection for projection in projections(arch) if projection.name in lora.projections]


def lora_parameters(arch: Architecture, lora: Lora) -> int:
    """Parameters of the adapters: an A [rank, in] and a B [out, rank] for each target of each layer."""
    widths = sum(projection.num_inputs + projection.num_outputs for projection in targets(arch, lora))
    return arch.num_layers * lora.rank * widths
