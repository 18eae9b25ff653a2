"""What an optimizer is told of a model's parameters beside their names: other names, and matrices stored as one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from burnish.models.decoder import Decoder
from burnish.models.ops.lora import LoraLinear
from burnish.models.projections import targets
from burnish.models.row_order import order_of
from burnish.models.weights import blocks
from burnish.training.optimizers.muon import Fused


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Hugging Face's names of each parameter of our decoder: one, or one for each block of its rows."""
    names: dict[str, list[str]] = {}
    for prefix, decoder in _decoders(model).items():
        for block in blocks(decoder.arch):
            names.setdefault(prefix + block.ours, []).append(block.theirs)
    return names


def fused_matrices(model: nn.Module) -> dict[str, Fused]:
    """The matrices of each parameter that holds more than one."""
    heights: dict[str, list[int]] = {}
    orders: dict[str, Tensor | None] = {}
    for prefix, decoder in _decoders(model).items():
        for block in blocks(decoder.arch):
            if block.stop is not None:
                heights.setdefault(prefix + block.ours, []).append(block.stop - block.start)
                orders[prefix + block.ours] = order_of(decoder, block.ours)
        for name, module in decoder.named_modules():
            if isinstance(module, LoraLinear) and decoder.lora is not None:
                sizes = [t.num_outputs for t in targets(decoder.arch, decoder.lora) if name.endswith(f".{t.module}")]
                heights[f"{prefix}{name}.lora_a"] = [module.rank] * len(sizes)
                heights[f"{prefix}{name}.lora_b"] = sizes
                orders[f"{prefix}{name}.lora_b"] = order_of(decoder, f"{name}.lora_b")
    return {name: Fused(sizes, orders.get(name)) for name, sizes in heights.items() if len(sizes) > 1}


def _decoders(model: nn.Module) -> Mapping[str, Decoder]:
    """Our decoders in a model (a critic has one inside), by the prefix of their parameters' names."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Decoder)}
    return {f"{name}." if name else "": module for name, module in found.items()}
