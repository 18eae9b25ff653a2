"""Learning-rate factor and weight decay of each parameter (`optimizer.groups`), and the matrices that a fused parameter holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Optimizer as Config
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import LoraLinear
from burnish.models.weight_blocks import weight_blocks
from burnish.models.weight_layout import lora_targets, row_order_of


@dataclass(frozen=True)
class ParameterSetting:
    """Learning-rate factor and weight decay of one parameter."""

    lr_scale: float = 1.0
    decay: float = 0.0


def parameter_settings(
    parameters: Mapping[str, Tensor], config: Config, aliases: Mapping[str, Sequence[str]] | None = None
) -> dict[str, ParameterSetting]:
    """The setting of every parameter: that of the first matching group, or the optimizer's.

    `aliases` are other names of a parameter, or of the blocks of rows it consists of. Norm scales and biases have no decay unless a
    group sets it.
    """
    aliases = aliases or {}
    found = {
        name: ParameterSetting(decay=config.weight_decay if parameter.dim() >= 2 else 0.0)
        for name, parameter in parameters.items()
    }
    left = list(parameters)
    for group in config.groups:
        matched = [name for name in parameters if _matches(group.match, name, aliases.get(name, ()))]
        taken = [name for name in matched if name in left]
        if not taken:
            raise _no_match_error(
                group.match, matched, [n for name in parameters for n in (name, *aliases.get(name, ()))]
            )
        left = [name for name in left if name not in matched]
        for name in taken:
            decay = found[name].decay if group.weight_decay is None else group.weight_decay
            found[name] = ParameterSetting(group.lr_scale, decay)
    return found


def _matches(pattern: str, name: str, others: Sequence[str]) -> bool:
    if re.search(pattern, name):
        return True
    hits = [other for other in others if re.search(pattern, other)]
    if hits and len(hits) < len(others):
        rest = [other for other in others if other not in hits]
        raise UserError(
            f"optimizer.groups: {pattern!r} matches {', '.join(hits)}, which is one parameter, {name}, with {', '.join(rest)}: "
            "match all of them or none"
        )
    return bool(hits)


def _no_match_error(pattern: str, matched: Sequence[str], names: Sequence[str]) -> UserError:
    if matched:
        return UserError(
            f"optimizer.groups: everything {pattern!r} matches is in an earlier group, {matched[0]} for one: "
            "the first group that matches counts, so put the narrower one first"
        )
    general = list(dict.fromkeys(re.sub(r"\.\d+\.", r".<i>.", name) for name in names))
    near = sorted(general, key=lambda name: -_similarity(pattern, name))[:3]
    return UserError(f"optimizer.groups: {pattern!r} matches no parameter; the nearest are {', '.join(near)}")


def _similarity(pattern: str, name: str) -> float:
    return max(SequenceMatcher(None, pattern, word).ratio() for word in (name, *name.split(".")))


@dataclass(frozen=True)
class FusedMatrices:
    """Several matrices with the same number of columns, stored as one parameter."""

    heights: Sequence[int]
    order: Tensor | None = None
    """Row i of the parameter is row order[i] of the concatenated matrices; None if it is row i."""

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split the parameter's rows into the matrices."""
        return list((rows if self.order is None else rows[self.order.argsort()]).split(list(self.heights)))

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        rows = torch.cat(list(matrices))
        return rows if self.order is None else rows[self.order]


def hf_names(model: nn.Module) -> dict[str, list[str]]:
    """Hugging Face names of each parameter of our decoder: one, or one per block of its rows."""
    names: dict[str, list[str]] = {}
    for prefix, decoder in _decoders(model).items():
        for block in weight_blocks(decoder.arch):
            names.setdefault(prefix + block.parameter_name, []).append(block.hf_name)
    return names


def fused_matrices(model: nn.Module) -> dict[str, FusedMatrices]:
    """The matrices of each parameter that holds several."""
    heights: dict[str, list[int]] = {}
    orders: dict[str, Tensor | None] = {}
    for prefix, decoder in _decoders(model).items():
        for block in weight_blocks(decoder.arch):
            if block.stop is not None:
                heights.setdefault(prefix + block.parameter_name, []).append(block.stop - block.start)
                orders[prefix + block.parameter_name] = row_order_of(decoder, block.parameter_name)
        for name, module in decoder.named_modules():
            if isinstance(module, LoraLinear) and decoder.lora is not None:
                _, index, path = name.split(".", 2)
                targets = lora_targets(decoder.arch, decoder.lora, int(index))
                sizes = [target.num_outputs for target in targets if target.module == path]
                heights[f"{prefix}{name}.lora_a"] = [module.rank] * len(sizes)
                heights[f"{prefix}{name}.lora_b"] = sizes
                orders[f"{prefix}{name}.lora_b"] = row_order_of(decoder, f"{name}.lora_b")
    return {name: FusedMatrices(sizes, orders.get(name)) for name, sizes in heights.items() if len(sizes) > 1}


def _decoders(model: nn.Module) -> Mapping[str, Decoder]:
    """The native decoders in a model (a critic contains one), by the prefix of their parameters' names."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Decoder)}
    return {f"{name}." if name else "": module for name, module in found.items()}
