"""The products of a decoder layer in passes over a KV cache: in the model's dtype, batch-invariant, or in 8 bits.

    qkv      = products.attention_input(layer, x, delta)    x += delta, then the projections of its norm
    delta    = products.into_residual(layer.out, mixed)     a product whose result is added to the residual
    delta    = products.mlp(layer, x, delta)                x += delta, then the MLP or the experts of its norm

All three have the arithmetic of `Layer.forward`, up to their rounding. A delta may be partial sums [P, N, hidden], which the next
norm adds up, unless the family norms it first (`out_norms`).

`Fp8Products` holds copies of the layers' matrices in 8 bits, which `refresh` writes again after an update. Their rows have a scale
each, and so have the rows that they multiply (`kernels/fp8.py`). Embedding, head, norms, biases and adapters keep their dtype, and
so do small projections of attention, whose product of few rows takes as long in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.config.errors import UserError
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, Layer
from burnish.models.kernels.cuda.products import gated_product, has_gated_product, has_partial_product, partial_product
from burnish.models.kernels.elementwise import exact_geglu
from burnish.models.kernels.exact import exact_experts, exact_linear, exact_swiglu
from burnish.models.kernels.fp8 import (
    FP8_CAPABILITY,
    FP8_SCALE_BYTES,
    SCALED_PRODUCT_MULTIPLE,
    Fp8Rows,
    empty_rows,
    quantise_rows,
    scaled_product,
)
from burnish.models.kernels.half_products import PLAIN_LINEARS
from burnish.models.kernels.inference_ops import add_norm, add_norm_rows, gated_linear, partial_linear
from burnish.models.kernels.latent_ops import LatentHeads
from burnish.models.latent_attention import LatentProjection
from burnish.models.lora.adapters import LoraLinear, add_low_rank_
from burnish.models.weight_layout import layer_matrices

MLP_MATRICES = ("gate_up", "down")
EXACT_GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": exact_swiglu, "gelu_tanh": exact_geglu}
MIN_PROJECTION = 1 << 22
"""Numbers of an attention projection from which 8 bits pay on a GPU. Those of a 1.5B model are smaller, those of a 7B model larger."""


class LayerProducts(Protocol):
    """The products of a layer."""

    def attention_input(self, layer: Layer, x: Tensor, delta: Tensor | None, has_latents: bool) -> Tensor | LatentHeads:
        """Add `delta` to x in place; the projections of x's norm, as the layer's cache needs them."""

    def into_residual(self, module: nn.Linear, x: Tensor) -> Tensor:
        """A linear layer whose result is added to the residual: [N, out], or partial sums [P, N, out]."""

    def mlp(self, layer: Layer, x: Tensor, delta: Tensor) -> Tensor:
        """Add `delta` to x in place; the MLP or the experts of x's norm, without an output norm."""


class ModelProducts:
    """Products in the model's dtype."""

    def attention_input(self, layer: Layer, x: Tensor, delta: Tensor | None, has_latents: bool) -> Tensor | LatentHeads:
        return self._projected(layer.qkv, _attention_norm(layer, x, delta), has_latents)

    def into_residual(self, module: nn.Linear, x: Tensor) -> Tensor:
        return partial_linear(module, x)

    def mlp(self, layer: Layer, x: Tensor, delta: Tensor) -> Tensor:
        normed = _mlp_norm(layer, x, delta)
        if layer.experts is not None:
            computed = layer.experts.infer(normed)
            if layer.has_dense_mlp:
                computed = computed + layer.down(layer.gated_activation(layer.gate_up(normed)))
            return computed
        return self.into_residual(
            layer.down, gated_linear(layer.gate_up, normed, layer.arch.activation, layer.gated_activation)
        )

    def _projected(self, project: nn.Module, normed: Tensor, has_latents: bool) -> Tensor | LatentHeads:
        if not isinstance(project, LatentProjection):
            return cast(Tensor, project(normed))
        return project.heads(normed) if has_latents else project.project(normed, nn.Linear.__call__)


class WholeProducts(ModelProducts):
    """Products in the model's dtype without partial sums, for families that norm what they add to the residual."""

    def into_residual(self, module: nn.Linear, x: Tensor) -> Tensor:
        return cast(Tensor, module(x))


class ExactProducts:
    """Products whose result for a row does not depend on other rows (`kernels/exact.py`)."""

    def attention_input(self, layer: Layer, x: Tensor, delta: Tensor | None, has_latents: bool) -> Tensor | LatentHeads:
        normed = _attention_norm(layer, x, delta)
        project = layer.qkv
        return (
            project.project(normed, exact_linear)
            if isinstance(project, LatentProjection)
            else exact_linear(project, normed)
        )

    def into_residual(self, module: nn.Linear, x: Tensor) -> Tensor:
        return exact_linear(module, x)

    def mlp(self, layer: Layer, x: Tensor, delta: Tensor) -> Tensor:
        normed, activate = _mlp_norm(layer, x, delta), EXACT_GATED_ACTIVATIONS[layer.arch.activation]
        if layer.experts is None:
            return exact_linear(layer.down, activate(exact_linear(layer.gate_up, normed)))
        computed = exact_experts(layer.experts, normed, activate)
        if layer.has_dense_mlp:
            computed = computed + exact_linear(layer.down, activate(exact_linear(layer.gate_up, normed)))
        return computed


def _attention_norm(layer: Layer, x: Tensor, delta: Tensor | None) -> Tensor:
    return add_norm(x, delta, layer.attention_norm.weight, layer.arch.norm_eps, layer.arch.norm_shift)


def _mlp_norm(layer: Layer, x: Tensor, delta: Tensor) -> Tensor:
    return add_norm(x, delta, layer.mlp_norm.weight, layer.arch.norm_eps, layer.arch.norm_shift)


# --- 8 bits --------------------------------------------------------------------------------------------------------------


class Fp8Products(ModelProducts):
    """Products of 8-bit copies of a decoder's matrices, of the attention projections if they have `min_projection` numbers."""

    def __init__(self, model: Decoder, min_projection: int = MIN_PROJECTION) -> None:
        check_fp8_weights(model)
        self.modules = _quantised_layers(model, min_projection)
        if not self.modules:
            raise UserError(
                f"rollout.weights=fp8: no matrix of this model can be multiplied in 8 bits, which needs inputs and outputs that are multiples "
                f"of {SCALED_PRODUCT_MULTIPLE}: set rollout.weights=model"
            )
        self.matrices = {id(module): empty_rows(module.weight.shape, module.weight.device) for module in self.modules}
        self.has_partial_sums = not model.arch.out_norms
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the model's present weights."""
        for module in self.modules:
            rows, matrix = quantise_rows(module.weight.detach()), self.matrices[id(module)]
            matrix.data.view(torch.uint8).copy_(rows.data.view(torch.uint8))
            matrix.scale.copy_(rows.scale)

    def attention_input(self, layer: Layer, x: Tensor, delta: Tensor | None, has_latents: bool) -> Tensor | LatentHeads:
        matrix = self.matrices.get(id(layer.qkv))
        if matrix is None:
            return super().attention_input(layer, x, delta, has_latents)
        norm = layer.attention_norm.weight, layer.arch.norm_eps, layer.arch.norm_shift
        return self._normed_product(cast(nn.Linear, layer.qkv), matrix, x, delta, *norm)

    def into_residual(self, module: nn.Linear, x: Tensor) -> Tensor:
        matrix = self.matrices.get(id(module))
        if matrix is None:
            return partial_linear(module, x) if self.has_partial_sums else cast(Tensor, module(x))
        return self._product(module, matrix, quantise_rows(x), x, self.has_partial_sums)

    def mlp(self, layer: Layer, x: Tensor, delta: Tensor) -> Tensor:
        module, matrix = layer.gate_up, self.matrices.get(id(layer.gate_up))
        if matrix is None:
            return super().mlp(layer, x, delta)
        norm = layer.mlp_norm.weight, layer.arch.norm_eps, layer.arch.norm_shift
        if type(module) in PLAIN_LINEARS and module.bias is None:
            rows = add_norm_rows(x, delta, *norm)
            if has_gated_product(rows, matrix, layer.arch.activation):
                return self.into_residual(layer.down, gated_product(rows, matrix, layer.arch.activation))
            computed = scaled_product(rows, matrix, x.dtype)
        else:
            computed = self._normed_product(module, matrix, x, delta, *norm)
        return self.into_residual(layer.down, layer.gated_activation(computed))

    def _normed_product(
        self, module: nn.Linear, matrix: Fp8Rows, x: Tensor, delta: Tensor | None, *norm: Tensor | float
    ) -> Tensor:
        """Add `delta` to x in place; a linear layer of its norm."""
        weight, eps, shift = cast(tuple[Tensor, float, float], norm)
        if not isinstance(module, LoraLinear):
            return self._product(module, matrix, add_norm_rows(x, delta, weight, eps, shift), x, is_partial=False)
        normed = add_norm(x, delta, weight, eps, shift)  # the adapters read it too
        return self._product(module, matrix, quantise_rows(normed), normed, is_partial=False)

    def _product(self, module: nn.Linear, matrix: Fp8Rows, rows: Fp8Rows, x: Tensor, is_partial: bool) -> Tensor:
        """A linear layer of the rows; `x` are the same rows in the model's dtype, which adapters read."""
        has_adapters = isinstance(module, LoraLinear) and module.is_on
        if is_partial and not has_adapters and module.bias is None and has_partial_product(rows, matrix):
            return partial_product(rows, matrix)
        y = scaled_product(rows, matrix, x.dtype, module.bias)
        if isinstance(module, LoraLinear) and module.is_on:
            add_low_rank_(y, functional.linear(x, module.lora_a), module.lora_b, module.spans, module.scale)
        return y


def check_fp8_weights(model: Decoder) -> None:
    """Refuse 8-bit copies of the weights where they cannot be used."""
    _check_model_copies(model)
    weight = model.embedding.weight
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(weight.device)
        raise UserError(
            f"rollout.weights=fp8 needs a GPU that computes with 8-bit floats (Ada, Hopper or later), and this is a {name}"
        )
    if weight.is_cuda and weight.dtype != torch.bfloat16:
        raise UserError(
            f"rollout.weights=fp8: the GPU's 8-bit product gives bfloat16, and the model is in {str(weight.dtype)[6:]}: set model.dtype=bfloat16"
        )


def check_fp8_copies(arch: Architecture, is_quantised: bool) -> None:
    """Refuse models that have no 8-bit copies on any device. `is_quantised`: their matrices are in 4 bits."""
    if arch.experts is not None or arch.latent is not None:
        what = "experts" if arch.experts is not None else "latent attention"
        raise UserError(
            f"rollout.weights=fp8: matrices of {what} are not multiplied in 8 bits: set rollout.weights=model"
        )
    if is_quantised:
        raise UserError(
            "rollout.weights=fp8: the matrices are in 4 bits already: set rollout.weights=model, or model.lora.base=dtype"
        )


def _check_model_copies(model: Decoder) -> None:
    is_quantised = not all(isinstance(module.weight, Tensor) for _, module in _linear_layers(model))
    check_fp8_copies(model.arch, is_quantised)


def fp8_copy_bytes(model: Decoder) -> int:
    """Memory of the 8-bit copies that an engine on the model holds."""
    _check_model_copies(model)
    layers = _quantised_layers(model, MIN_PROJECTION)
    return sum(layer.weight.numel() + layer.out_features * FP8_SCALE_BYTES for layer in layers)


def _quantised_layers(model: Decoder, min_projection: int) -> list[nn.Linear]:
    """The linear layers whose matrices are copied."""
    return [
        module
        for name, module in _linear_layers(model)
        if _can_quantise(module) and (name in MLP_MATRICES or module.weight.numel() >= min_projection)
    ]


def _linear_layers(model: Decoder) -> Iterator[tuple[str, nn.Linear]]:
    for index, layer in enumerate(model.layers):
        for name in layer_matrices(model.arch, index):
            yield name, cast(nn.Linear, layer.get_submodule(name))


def _can_quantise(module: nn.Linear) -> bool:
    outputs, inputs = module.weight.shape
    is_divisible = outputs % SCALED_PRODUCT_MULTIPLE == inputs % SCALED_PRODUCT_MULTIPLE == 0
    return type(module) in (*PLAIN_LINEARS, LoraLinear) and is_divisible


def products_of(model: Decoder, exact: bool, weights: str) -> LayerProducts:
    """The products of an engine: batch-invariant if `exact`, in 8 bits if `weights` is fp8, else in the model's dtype."""
    if exact:
        return ExactProducts()
    if weights == "fp8":
        return Fp8Products(model)
    return WholeProducts() if model.arch.out_norms else ModelProducts()
