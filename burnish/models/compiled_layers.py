"""Decoder layers through torch.compile: the operations before attention and those after it are one graph each.

Neither attention nor experts are compiled. Attention is a kernel of its own, and its plan changes with every packing. The graphs use plain torch
operations, which the compiler fuses, instead of our kernels. The number of tokens is marked dynamic, so that a micro-batch
of another size does not recompile. The compiler decides what to save for the backward pass and what to recompute.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.config.errors import UserError
from burnish.models.decoder import Layer
from burnish.models.kernels.elementwise import GELU_FORM
from burnish.models.kernels.shared_prefix import Attend


def compile_layers(model: nn.Module) -> None:
    """Switch every layer of a decoder to its compiled forward pass."""
    check_compile(model)
    for module in model.modules():
        if isinstance(module, Layer):
            module.forward_override = compiled_forward


def check_compile(model: nn.Module) -> None:
    """Raise if the layers cannot be compiled."""
    if not any(isinstance(module, Layer) for module in model.modules()):
        raise UserError(
            "training.layers=compiled needs the native decoder, and this model runs through transformers: set training.layers=plain"
        )
    on_cpu = all(not parameter.is_cuda for parameter in model.parameters())
    if on_cpu and not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++")):
        raise UserError(
            "training.layers=compiled needs a C++ compiler on a CPU, and there is neither g++ nor clang++: set training.layers=plain"
        )


def compiled_forward(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """The compiled forward pass of a layer. In inference mode (an engine's small steps) the plain one runs."""
    if torch.is_inference_mode_enabled():
        return layer.eager_forward(x, cos, sin, attend)
    before, after, to_experts, mark = _compiled_parts()
    for tensor in (x, cos, sin):
        mark(tensor, 0)
    rotated, v = before(layer, x, cos, sin)
    mixed = layer.attention(rotated, v, attend)
    mark(mixed, 0)
    if layer.experts is not None:
        x, normed = to_experts(layer, x, mixed)
        return x + layer.mlp(normed)
    return after(layer, x, mixed)


@cache
def _compiled_parts() -> tuple[Any, Any, Any, Any]:
    """Compiled on first use, because the compiler takes seconds to import."""
    from torch._dynamo import maybe_mark_dynamic

    return (
        torch.compile(_before_attention, fullgraph=True),
        torch.compile(_after_attention, fullgraph=True),
        torch.compile(_after_attention_of_experts, fullgraph=True),
        maybe_mark_dynamic,
    )


def _before_attention(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated query and key heads, and value heads."""
    arch = layer.arch
    qk, v = layer.split_heads(layer.qkv(layer.attention_norm.functional(x)))
    if arch.qk_norm:
        q, k = qk.split([arch.num_heads, arch.num_kv_heads], 1)
        qk = torch.cat([layer.q_norm.functional(q) * arch.query_scale, layer.k_norm.functional(k)], 1)
    elif arch.wide_qk_norm:
        q, k = (heads.flatten(1) for heads in qk.split([arch.num_heads, arch.num_kv_heads], 1))
        qk = torch.cat([layer.q_norm.functional(q), layer.k_norm.functional(k)], 1).view(qk.shape)
    low, high = qk.chunk(2, -1)
    return qk * cos + torch.cat([high, low], -1) * sin, v


def _after_attention_of_experts(layer: Layer, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """The residual after attention, and the input of the experts, which run as they are."""
    attended = layer.out(mixed)
    x = x + (layer.attention_out_norm.functional(attended) if layer.arch.out_norms else attended)
    return x, layer.mlp_norm.functional(x)


def _after_attention(layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
    has_out_norms = layer.arch.out_norms
    attended = layer.out(mixed)
    x = x + (layer.attention_out_norm.functional(attended) if has_out_norms else attended)
    gate, up = layer.gate_up(layer.mlp_norm.functional(x)).chunk(2, -1)
    activated = (
        functional.silu(gate) if layer.arch.activation == "silu" else functional.gelu(gate, approximate=GELU_FORM)
    )
    computed = layer.down(activated * up)
    return x + (layer.mlp_out_norm.functional(computed) if has_out_norms else computed)
