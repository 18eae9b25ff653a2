"""The tensors of a decoder: each Hugging Face tensor is a block of rows of one of our parameters.

Query, key and value are rows of `qkv`, gate and up rows of `gate_up`. One table serves loading, saving and weight sync. The modules
of a vision tower have Hugging Face's names, so its tensors are whole parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from burnish.core.sharded_tensors import Shard
from burnish.models.architecture import Architecture
from burnish.models.latent_shape import LatentShape
from burnish.models.model_families import FAMILIES
from burnish.models.vision.interfaces import VisionShape
from burnish.models.vision.tensor_names import TOWER
from burnish.models.vision.towers import build_tower
from burnish.models.weight_layout import dense_mlp_name

HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True)
class WeightBlock:
    """The Hugging Face tensor `hf_name` is rows [start, stop) of our parameter `parameter_name`."""

    hf_name: str
    parameter_name: str
    start: int = 0
    stop: int | None = None

    def shard(self, parameters: Mapping[str, Tensor]) -> Shard:
        """The block as a shard of the whole parameter."""
        shape = tuple(parameters[self.parameter_name].shape)
        stop = shape[0] if self.stop is None else self.stop
        return Shard(shape, (self.start, *(0 for _ in shape[1:])), (stop - self.start, *shape[1:]))


def weight_blocks(arch: Architecture) -> list[WeightBlock]:
    """All tensors of a decoder, in Hugging Face's order."""
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    vision_names = FAMILIES[arch.family].vision_names
    prefix = "model." if vision_names is None else vision_names.decoder
    table = [WeightBlock(f"{prefix}embed_tokens.weight", "embedding.weight")]
    for i in range(arch.num_layers):
        theirs, ours = f"{prefix}layers.{i}.", f"layers.{i}."
        if arch.latent is not None:
            table += _latent_blocks(arch, arch.latent, theirs, ours)
        for kind in () if arch.latent is not None else ("weight", "bias") if arch.qkv_bias else ("weight",):
            table += [
                WeightBlock(f"{theirs}self_attn.q_proj.{kind}", f"{ours}qkv.{kind}", 0, q),
                WeightBlock(f"{theirs}self_attn.k_proj.{kind}", f"{ours}qkv.{kind}", q, q + kv),
                WeightBlock(f"{theirs}self_attn.v_proj.{kind}", f"{ours}qkv.{kind}", q + kv, q + 2 * kv),
            ]
        for kind in ("weight", "bias") if arch.out_bias else ("weight",):
            table.append(WeightBlock(f"{theirs}self_attn.o_proj.{kind}", f"{ours}out.{kind}"))
        if arch.qk_norm or arch.wide_qk_norm:
            table.append(WeightBlock(f"{theirs}self_attn.q_norm.weight", f"{ours}q_norm.weight"))
            table.append(WeightBlock(f"{theirs}self_attn.k_norm.weight", f"{ours}k_norm.weight"))
        if arch.has_experts(i):
            table += _expert_blocks(arch, theirs, f"{ours}experts.")
        mlp, size = f"{theirs}{dense_mlp_name(arch, i)}", arch.dense_size(i)
        for kind in () if not size else ("weight", "bias") if arch.mlp_bias else ("weight",):
            table += [
                WeightBlock(f"{mlp}.gate_proj.{kind}", f"{ours}gate_up.{kind}", 0, size),
                WeightBlock(f"{mlp}.up_proj.{kind}", f"{ours}gate_up.{kind}", size, 2 * size),
                WeightBlock(f"{mlp}.down_proj.{kind}", f"{ours}down.{kind}"),
            ]
        norms = FAMILIES[arch.family].norms.items()
        table += [
            WeightBlock(f"{theirs}{their_norm}.weight", f"{ours}{our_norm}.weight") for our_norm, their_norm in norms
        ]
    table.append(WeightBlock(f"{prefix}norm.weight", "norm.weight"))
    if not arch.tied:
        head = HEAD_NAME if vision_names is None else vision_names.head
        table.append(WeightBlock(head, "head.weight"))
    return [*table, *_tower_blocks(arch)]


def _expert_blocks(arch: Architecture, theirs: str, ours: str) -> list[WeightBlock]:
    """The tensors of a layer's experts; `theirs` and `ours` are the prefixes of the layer and of its experts."""
    shape, names = arch.experts, FAMILIES[arch.family].expert_names
    assert shape is not None
    assert names is not None, f"family {arch.family} has names for its experts"
    hidden, size = arch.hidden_size, shape.expert_size
    table = [WeightBlock(f"{theirs}{names.router}.weight", f"{ours}router.weight")]
    if shape.has_score_bias:
        table.append(WeightBlock(f"{theirs}{names.router}.e_score_correction_bias", f"{ours}score_bias"))
    for e in range(shape.num_experts):
        middle, row = (2 * e + 1) * size, 2 * e * size
        table += [
            WeightBlock(f"{theirs}{names.gate.format(e)}.weight", f"{ours}gate_up.weight", row, middle),
            WeightBlock(f"{theirs}{names.up.format(e)}.weight", f"{ours}gate_up.weight", middle, middle + size),
        ]
    for e in range(shape.num_experts):
        rows = e * hidden, (e + 1) * hidden
        table.append(WeightBlock(f"{theirs}{names.down.format(e)}.weight", f"{ours}down.weight", *rows))
    return table


def _latent_blocks(arch: Architecture, latent: LatentShape, theirs: str, ours: str) -> list[WeightBlock]:
    """The tensors of latent attention before its output; `theirs` and `ours` are the prefixes of the layer."""
    theirs, ours, query_rank = f"{theirs}self_attn.", f"{ours}qkv.", latent.query_rank or 0
    table = []
    for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
        if query_rank:
            table.append(WeightBlock(f"{theirs}q_a_proj.{kind}", f"{ours}latent.{kind}", 0, query_rank))
        table.append(WeightBlock(f"{theirs}kv_a_proj_with_mqa.{kind}", f"{ours}latent.{kind}", query_rank))
    if query_rank:
        table.append(WeightBlock(f"{theirs}q_a_layernorm.weight", f"{ours}q_norm.weight"))
    table += [
        WeightBlock(f"{theirs}{'q_b_proj' if query_rank else 'q_proj'}.weight", f"{ours}q_up.weight"),
        WeightBlock(f"{theirs}kv_a_layernorm.weight", f"{ours}kv_norm.weight"),
        WeightBlock(f"{theirs}kv_b_proj.weight", f"{ours}kv_up.weight"),
    ]
    return table


def _tower_blocks(arch: Architecture) -> list[WeightBlock]:
    """The tensors of a vision tower with its projector."""
    names = FAMILIES[arch.family].vision_names
    if arch.vision is None or names is None:
        return []
    return [WeightBlock(names.tower_name(name), TOWER + name) for name in _tower_parameters(arch.vision)]


@lru_cache(maxsize=8)
def _tower_parameters(shape: VisionShape) -> tuple[str, ...]:
    """The names of a tower's parameters, in its order."""
    with torch.device("meta"):
        return tuple(name for name, _ in build_tower(shape).named_parameters())
