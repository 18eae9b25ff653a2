"""Decoder layers that train with products in 8-bit floats (`training.layers=fp8`).

The linear layers of all decoder layers multiply in 8 bits (`kernels/fp8_linear.py`): forward, gradient of the input, gradient of the
weight. Embedding, norms, attention and the output head keep the model's dtype, and so do the weights, which are quantised in every pass.
The frozen matrix under an adapter has the first two products in 8 bits; the adapter itself keeps its dtype.

Every pass of the learner computes so, with gradient or without, and so does a reference on a copy of the model: their log-probs stay
comparable. An engine samples in inference mode, in which the layers compute as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.config.errors import UserError
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.kernels.fp8 import FP8_CAPABILITY, SCALED_PRODUCT_MULTIPLE
from burnish.models.kernels.fp8_linear import fp8_linear
from burnish.models.lora.adapters import LoraLinear
from burnish.models.nf4 import Nf4Weight
from burnish.models.weight_layout import layer_matrices

HINT = "set training.layers=plain"


def set_fp8(model: nn.Module, is_on: bool, device: torch.device | None = None) -> None:
    """Set whether the linear layers of a model's decoder layers multiply in 8 bits. Call it before the model is divided over processes.

    `device` is where it will compute; None means where its parameters are.
    """
    if is_on:
        check_fp8(model, device)
    for linear in _layer_linears(model).values():
        if isinstance(linear, LoraLinear):
            linear.in_fp8 = is_on
            continue
        vars(linear).pop("forward", None)
        if is_on:
            cast(Any, linear).forward = partial(_forward, linear)


def check_fp8(model: nn.Module, device: torch.device | None = None) -> None:
    """Raise if the layers of a model cannot multiply in 8 bits on a device."""
    decoder = next((module for module in model.modules() if isinstance(module, Decoder)), None)
    if decoder is None:
        raise UserError(
            "training.layers=fp8 needs the native decoder, and this model runs through transformers: " + HINT
        )
    is_quantised = any(isinstance(linear.weight, Nf4Weight) for linear in _layer_linears(model).values())
    check_fp8_architecture(decoder.arch, is_quantised)
    device = decoder.embedding.weight.device if device is None else device
    if device.type == "cuda":
        _check_gpu(model, decoder.embedding.weight, device)


def check_fp8_architecture(arch: Architecture, is_quantised: bool) -> None:
    """Raise if layers of an architecture have no products in 8 bits. `is_quantised`: their frozen matrices are in 4 bits."""
    if arch.experts is not None:
        raise UserError("training.layers=fp8: the grouped products of experts have no 8-bit form here: " + HINT)
    if arch.latent is not None:
        raise UserError("training.layers=fp8: the projections of latent attention have no 8-bit form here: " + HINT)
    if is_quantised:
        raise UserError(
            "training.layers=fp8: a matrix in 4 bits would be dequantised and quantised again for every product: "
            f"set model.lora.base=dtype, or {HINT}"
        )


def _check_gpu(model: nn.Module, weight: Tensor, device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"training.layers=fp8 needs a GPU that multiplies 8-bit floats (Ada, Hopper or later), and this is a {name}: {HINT}"
        )
    if weight.dtype != torch.bfloat16:
        raise UserError(
            f"training.layers=fp8: 8-bit products on a GPU are bfloat16, and this model is {weight.dtype}: "
            f"set model.dtype=bfloat16, or {HINT}"
        )
    for name, linear in _layer_linears(model).items():
        if linear.in_features % SCALED_PRODUCT_MULTIPLE or linear.out_features % SCALED_PRODUCT_MULTIPLE:
            raise UserError(
                f"training.layers=fp8: a GPU multiplies 8-bit matrices whose sides are multiples of {SCALED_PRODUCT_MULTIPLE}, and "
                f"{name} has {linear.in_features} inputs and {linear.out_features} outputs: {HINT}"
            )


def _layer_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of all decoder layers of a model by name."""
    return {
        f"{path}.layers.{index}.{name}".lstrip("."): cast(nn.Linear, layer.get_submodule(name))
        for path, decoder in model.named_modules()
        if isinstance(decoder, Decoder)
        for index, layer in enumerate(decoder.layers)
        for name in layer_matrices(decoder.arch, index)
    }


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    if torch.is_inference_mode_enabled():
        return functional.linear(x, linear.weight, linear.bias)
    return fp8_linear(x, linear.weight, linear.bias)
