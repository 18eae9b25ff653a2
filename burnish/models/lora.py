"""LoRA on our decoder: adding adapters, switching them off, swapping their content, merging them (layers: `ops/lora.py`).

Everything but the adapters is frozen. Their parameters have the model's type, as all that engine and learner share; in
a half type the optimizer keeps float32 master copies of them, as of any parameter. A model with the adapter off is the
model it was added to, bit for bit, so a reference to stay near needs no copy of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from burnish.config.lora import Lora
from burnish.core.keys import fold
from burnish.core.local import local
from burnish.models.decoder import Decoder
from burnish.models.four_bits import quantise_layers
from burnish.models.ops.lora import LoraLinear
from burnish.models.projections import Projection, lora_parameters, projections, targets
from burnish.models.weights import blocks, hf_tensors

__all__ = ["adapter_off", "adapter_weights", "add_lora", "holding", "lora_parameters", "merged_tensors", "wrap_layers"]


def wrap_layers(model: Decoder, lora: Lora) -> None:
    """Freeze the model and give its targets adapters of zeros, on the very tensors it has, or on these in 4 bits."""
    model.requires_grad_(False)
    quantise_layers(model, lora.base)
    dtype = model.embedding.weight.dtype
    wanted = targets(model.arch, lora)
    for layer in model.layers:
        for name in dict.fromkeys(target.module for target in wanted):
            spans = [(target.start, target.stop) for target in wanted if target.module == name]
            base = cast(nn.Linear, getattr(layer, name))
            setattr(layer, name, LoraLinear(base, spans, lora.rank, lora.scale, dtype))
    model.lora = lora


@torch.no_grad()
def add_lora(model: Decoder, lora: Lora, seed: int) -> None:
    """Adapters that change nothing yet: B is 0; A is uniform in +-1/sqrt(inputs) (Kaiming's, as PEFT starts them).

    Each A depends on the seed, its layer and its name alone.
    """
    wrap_layers(model, lora)
    for index, target, a, _ in adapters(model):
        generator = torch.Generator().manual_seed(fold("lora", seed, index, target.name))
        bound = 1 / math.sqrt(target.num_inputs)
        a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))


def adapters(model: Decoder) -> Iterator[tuple[int, Projection, Tensor, Tensor]]:
    """(layer, projection, A [rank, in], B [out, rank]) of every adapter, as views of the parameters."""
    for index, layer in enumerate(model.layers):
        for projection in projections(model.arch):
            module = getattr(layer, projection.module)
            for (start, _), a, b in module.blocks() if isinstance(module, LoraLinear) else ():
                if start == projection.start:
                    yield index, projection, a, b


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the adapters by name; none where the model has no adapter."""
    return {name: p for name, p in model.named_parameters() if name.endswith((".lora_a", ".lora_b"))}


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapter. For passes without gradient: a backward that recomputes would find it on again."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


@contextmanager
def holding(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other adapter weights, by name; afterwards it has its own again, bit for bit, at the same addresses.

    Of a model that is spread over processes, `weights` are spread like it. A graph of the model's own forward may wait for its
    backward meanwhile.
    """
    own = {name: local(parameter) for name, parameter in adapter_weights(model).items()}
    kept = {name: tensor.clone() for name, tensor in own.items()}
    _write(own, weights)
    try:
        yield
    finally:
        _write(own, kept)


def _write(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        # By way of `data`, which autograd does not watch: it would refuse the backward of a graph that saved the parameter.
        tensor.data.copy_(local(weights[name]))


@torch.no_grad()
def merged_tensors(model: Decoder, wide: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face's names with the adapters added in: W + scale B A in float32 at least, rounded once to the
    model's type, or not at all if `wide`."""
    deltas = {
        (f"layers.{index}.{projection.module}.weight", projection.start): (a, b)
        for index, projection, a, b in adapters(model)
    }
    for block, (name, tensor) in zip(blocks(model.arch), hf_tensors(model), strict=True):
        if model.lora is not None and (block.ours, block.start) in deltas:
            a, b = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in deltas[block.ours, block.start])
            merged = tensor.to(a.dtype) + model.lora.scale * (b @ a)
            tensor = merged if wide else merged.to(tensor.dtype)
        yield name, tensor
