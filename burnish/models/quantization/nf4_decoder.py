"""A decoder whose layers' matrices are in 4 bits (`ops/nf4.py`): made so, filled from plain tensors, read as plain tensors.

Embedding, output head, norms and biases stay in the model's type. A matrix in 4 bits is a module of the name its parameter
had, so that whoever asks for weights by name finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from burnish.models.decoder import Decoder
from burnish.models.quantization.nf4 import Nf4Linear, Nf4Weight, dense

if TYPE_CHECKING:
    from burnish.config.model import Base

MATRICES = ("qkv", "out", "gate_up", "down")
"""The linear layers of a decoder layer."""


def quantise_layers(model: Decoder, base: Base) -> None:
    """Have the matrices of all layers in 4 bits, if `base` says so; those that are already stay as they are."""
    if base == "dtype":
        return
    for layer in model.layers:
        for name in MATRICES:
            linear = cast(nn.Linear, getattr(layer, name))
            if isinstance(linear.weight, Tensor):
                setattr(layer, name, Nf4Linear(linear, base == "nf4-double"))


def quantised_weights(model: nn.Module) -> dict[str, Nf4Weight]:
    """The matrices in 4 bits by the names their parameters would have."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Nf4Weight)}


def quantised_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What the matrices in 4 bits lie in, by name: beside the parameters all that the model is."""
    return {
        f"{name}.{key}": t for name, weight in quantised_weights(model).items() for key, t in weight.named_buffers()
    }


def num_quantised(model: nn.Module) -> int:
    """Numbers that are in 4 bits."""
    return sum(weight.shape[0] * weight.shape[1] for weight in quantised_weights(model).values())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a model, in whatever type."""
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def plain_bytes(model: Decoder, on_gpu: bool) -> int:
    """Bytes that are there while the largest matrix in 4 bits is made plain for a product: where no kernel does it, indices too."""
    largest = max((w.shape[0] * w.shape[1] for w in quantised_weights(model).values()), default=0)
    return largest * (model.embedding.weight.itemsize if on_gpu else 6)


def shapes_of(model: Decoder) -> dict[str, Tensor]:
    """A tensor of the shape and type of each weight, by name: the parameter, or one without memory."""
    dtype = model.embedding.weight.dtype
    without = {n: torch.empty(w.shape, dtype=dtype, device="meta") for n, w in quantised_weights(model).items()}
    return dict(model.named_parameters()) | without


class _ByName(Mapping[str, Tensor]):
    """Names of a model's weights; what is behind a name is for those who read, or write."""

    def __init__(self, model: Decoder) -> None:
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.quantised, self.dtype = quantised_weights(model), model.embedding.weight.dtype

    def __iter__(self) -> Iterator[str]:
        yield from self.parameters
        yield from self.quantised

    def __len__(self) -> int:
        return len(self.parameters) + len(self.quantised)


class PlainWeights(_ByName):
    """To read: the parameters, and each matrix in 4 bits as the plain one it stands for, made when it is asked for."""

    def __getitem__(self, name: str) -> Tensor:
        return dense(self.quantised[name], self.dtype) if name in self.quantised else self.parameters[name]


class WeightsToFill(_ByName):
    """To write: the parameters, and for each matrix in 4 bits a plain one that lasts until it is full.

    In float32, so that the 4 bits are those of the file's numbers, whatever the model's type.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.waiting: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.quantised:
            return self.parameters[name]
        if name not in self.waiting:
            weight = self.quantised[name]
            self.waiting[name] = torch.empty(weight.shape, dtype=torch.float32, device=weight.codes.device)
        return self.waiting[name]

    def filled(self, name: str) -> None:
        """To be called when all of a weight was written."""
        if name in self.waiting:
            self.quantised[name].write(self.waiting.pop(name))
