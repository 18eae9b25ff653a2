"""LoRA on the native decoder (2106.09685): add, disable, swap and merge adapters.

    y_i = W_i x + scale B_i A_i x        for each block i of rows of W that has an adapter

Query, key and value of a fused projection have one adapter each, as in Hugging Face's unfused layers. All A's form one
matrix, so that x is read once; each B adds into its columns of y. The backward saves only x and A x, and computes no
gradient of W, which may be in 4 bits (`nf4.py`). Every expert of a mixture has adapters of its own (`adapted_experts.py`), as in
files that PEFT wrote when experts were modules of their own: `mlp.experts.3.gate_proj.lora_A.weight`. The router has none.

All other parameters are frozen. Adapters have the model's dtype, since engine and learner share them; in a half type the
optimizer keeps float32 master copies. With its adapters disabled a model equals its base bit for bit, so a KL reference
needs no copy of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.core.random_keys import fold
from burnish.core.sharded_tensors import local_tensor, local_with_gradient
from burnish.models import adapted_experts
from burnish.models.adapted_experts import FrozenExperts
from burnish.models.decoder import Decoder, drop_features
from burnish.models.experts import Dispatch, ExpertLinear
from burnish.models.kernels import fp8_linear
from burnish.models.nf4 import Nf4, Nf4ExpertLinear, Nf4Weight, dense_weight, nf4_linear, quantise_layers
from burnish.models.vision.tensor_names import TOWER
from burnish.models.weight_blocks import weight_blocks
from burnish.models.weight_files import hf_tensors
from burnish.models.weight_layout import Projection, layer_matrices, lora_targets, projections, replace_module
from burnish.run.checkpoint.snapshot import writer_rank_of

Span = tuple[int, int]
"""Output columns [start, stop) that one adapter adds to."""


def add_low_rank_(y: Tensor, z: Tensor, b: Tensor, spans: Sequence[Span], scale: float) -> Tensor:
    """y[:, span_i] += scale z_i B_i^T with z [N, blocks * rank] and the stacked B's [outputs of the blocks, rank]."""
    row = 0
    for (start, stop), part in zip(spans, z.split(b.shape[1], 1), strict=True):
        y[:, start:stop].addmm_(part, b[row : row + stop - start].t(), alpha=scale)
        row += stop - start
    return y


class _LoraFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | Nf4,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        spans: Sequence[Span],
        scale: float,
        in_fp8: bool,
    ) -> Tensor:
        plain = [weight] if isinstance(weight, Tensor) else []
        if any(frozen is not None and frozen.requires_grad for frozen in (*plain, bias)):
            raise RuntimeError("the base weight of an adapter must be frozen: its gradient is never computed")
        z = functional.linear(x, a)  # [N, blocks * rank]
        ctx.save_for_backward(x, z, a, b, *plain)
        ctx.spans, ctx.scale, ctx.matrix, ctx.in_fp8 = spans, scale, None if plain else weight, in_fp8
        multiply = fp8_linear.product if in_fp8 else functional.linear
        return add_low_rank_(multiply(x, dense_weight(weight, x.dtype), bias), z, b, spans, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, z, a, b, *plain = ctx.saved_tensors
        parts = [grad[:, start:stop] for start, stop in ctx.spans]
        rows = b.split([stop - start for start, stop in ctx.spans])
        grad_b = torch.cat([p.t() @ z_i for p, z_i in zip(parts, z.split(b.shape[1], 1), strict=True)]).mul_(ctx.scale)
        grad_z = torch.cat([p @ b_i for p, b_i in zip(parts, rows, strict=True)], 1).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = dense_weight(plain[0] if plain else ctx.matrix, grad.dtype)
            grad_x = fp8_linear.input_gradient_of(grad, weight) if ctx.in_fp8 else grad @ weight
            grad_x.addmm_(grad_z, a)
        return grad_x, None, None, grad_z.t() @ x, grad_b, None, None, None


class LoraLinear(nn.Linear):
    """The frozen linear layer `base` with an adapter on each of the `spans` of its outputs.

    `lora_a` [blocks * rank, in] stacks the A's, `lora_b` [outputs of the blocks, rank] the B's. Both start as zeros, in
    `dtype` or else the dtype of the weight, so that the engine multiplies by exactly what the learner trains.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    weight: Tensor | Nf4Weight  # type: ignore[assignment]  # torch's Linear declares a tensor; in 4 bits it is a module
    in_fp8 = False
    """Whether the learner multiplies by the frozen weight in 8 bits (`fp8_layers.py`)."""

    def __init__(
        self, base: nn.Linear, spans: Sequence[Span], rank: int, scale: float, dtype: torch.dtype | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.spans, self.rank, self.scale = tuple(spans), rank, scale
        outputs = sum(stop - start for start, stop in spans)
        like = next(chain(base.parameters(), base.buffers()))
        dtype = like.dtype if dtype is None else dtype
        self.lora_a = nn.Parameter(like.new_zeros(len(self.spans) * rank, self.in_features, dtype=dtype))
        self.lora_b = nn.Parameter(like.new_zeros(outputs, rank, dtype=dtype))
        self.is_on = True
        """Whether the adapter is enabled; if not, the layer equals `base`."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to rows [N, in]; [N, out]."""
        weight = self.weight.matrix if isinstance(self.weight, Nf4Weight) else self.weight
        return self.product(x, weight, self.bias, self.lora_a, self.lora_b)

    def product(self, x: Tensor, weight: Tensor | Nf4, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        """The forward pass with the given tensors, for tensor-parallel layers."""
        if self.is_on and torch.is_grad_enabled():
            return _LoraFunction.apply(x, weight, bias, a, b, self.spans, self.scale, self.in_fp8)
        if self.in_fp8 and isinstance(weight, Tensor) and not torch.is_inference_mode_enabled():
            y = fp8_linear.fp8_linear(x, weight, bias)
        else:
            y = nf4_linear(x, weight, bias)
        return add_low_rank_(y, functional.linear(x, a), b, self.spans, self.scale) if self.is_on else y

    def blocks(self) -> list[tuple[Span, Tensor, Tensor]]:
        """(span, A [rank, in], B [outputs, rank]) of each adapter, as views."""
        rows = self.lora_b.split([stop - start for start, stop in self.spans])
        return list(zip(self.spans, self.lora_a.split(self.rank), rows, strict=True))


class LoraExpertLinear(LoraLinear):
    """The frozen matrices of all experts, each with an adapter on the same `spans` of its outputs."""

    def __init__(
        self, base: ExpertLinear | Nf4ExpertLinear, spans: Sequence[Span], rank: int, scale: float, dtype: torch.dtype
    ) -> None:
        super().__init__(base, spans, rank, scale, dtype)
        self.num_experts = base.num_experts
        self.expert_spans = self.spans[: len(self.spans) // base.num_experts]

    def frozen(self) -> FrozenExperts:
        """The matrices for a product, and where the adapters add to it if they are enabled."""
        return FrozenExperts(self.matrices, self.num_experts, self.expert_spans, self.rank, self.scale)

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """The dense matrices [experts, outputs, inputs]."""
        weight = local_with_gradient(self.weight) if isinstance(self.weight, Tensor) else self.weight
        return dense_weight(weight, dtype).view(self.num_experts, -1, self.in_features)

    @property
    def enabled_adapters(self) -> tuple[Tensor | None, Tensor | None]:
        return (local_with_gradient(self.lora_a), local_with_gradient(self.lora_b)) if self.is_on else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the rows of an expert layer have an expert each: call `from_tokens` or `to_tokens`")

    def from_tokens(self, x: Tensor, way: Dispatch) -> Tensor:
        """As `ExpertLinear.from_tokens`."""
        return adapted_experts.from_tokens(x, *self.enabled_adapters, way, self.frozen())

    def to_tokens(self, rows: Tensor, way: Dispatch) -> Tensor:
        """As `ExpertLinear.to_tokens`."""
        return adapted_experts.to_tokens(rows, *self.enabled_adapters, way, self.frozen())


def wrap_with_lora(model: Decoder, lora: Lora) -> None:
    """Freeze the model and add zero adapters to its target layers, which keep their tensors or are quantised to 4 bits.

    The adapters of a model whose weights will be read later are on the CPU, since no file has the values of new ones.
    """
    model.requires_grad_(False)
    quantise_layers(model, lora.base)
    dtype = model.embedding.weight.dtype
    for index, layer in enumerate(model.layers):
        wanted = lora_targets(model.arch, lora, index)
        for name in dict.fromkeys(target.module for target in wanted):
            spans = [(target.start, target.stop) for target in wanted if target.module == name]
            base = cast(nn.Linear, layer.get_submodule(name))
            if isinstance(base, ExpertLinear | Nf4ExpertLinear):
                adapted: LoraLinear = LoraExpertLinear(base, spans, lora.rank, lora.scale, dtype)
            else:
                adapted = LoraLinear(base, spans, lora.rank, lora.scale, dtype)
            replace_module(layer, name, adapted)
    model.lora = lora
    for name, parameter in adapter_weights(model).items() if model.unloaded_from is not None else ():
        path, _, kind = name.rpartition(".")
        setattr(model.get_submodule(path), kind, nn.Parameter(torch.zeros_like(parameter, device="cpu")))


@torch.no_grad()
def add_lora(model: Decoder, lora: Lora, seed: int) -> None:
    """Add new adapters: B is 0, A is uniform in +-1/sqrt(inputs) (Kaiming, as in PEFT), so the output is unchanged.

    Each A depends only on the seed, its layer and its name.
    """
    wrap_with_lora(model, lora)
    for index, target, a, _ in adapters(model):
        generator = torch.Generator().manual_seed(fold("lora", seed, index, target.name))
        bound = 1 / math.sqrt(target.num_inputs)
        a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))


def adapters(model: Decoder) -> Iterator[tuple[int, Projection, Tensor, Tensor]]:
    """(layer, projection, A [rank, in], B [out, rank]) of every adapter, as views of the parameters."""
    for index, layer in enumerate(model.layers):
        blocks: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        for name in layer_matrices(model.arch, index):
            module = layer.get_submodule(name)
            for (start, _), a, b in module.blocks() if isinstance(module, LoraLinear) else ():
                blocks[name, start] = a, b
        for projection in projections(model.arch, index):
            if (projection.module, projection.start) in blocks:
                yield index, projection, *blocks[projection.module, projection.start]


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by name, with what is trained of a vision tower beside them; empty if the model has no adapters."""
    adapters = {name: p for name, p in model.named_parameters() if name.endswith((".lora_a", ".lora_b"))}
    return adapters | (trained_tower_weights(model) if adapters else {})


def trained_tower_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters of a vision tower by name."""
    named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: p for name, p in named if name.removeprefix("backbone.").startswith(TOWER)}


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters within the block. Only for passes without gradient: a recomputing backward would run with them enabled."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


@contextmanager
def swapped_adapter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the model other adapter weights within the block; afterwards its own are restored in place, bit for bit.

    If the model is sharded over processes, `weights` are sharded alike. A graph of the model's own forward may be waiting
    for its backward meanwhile.
    """
    own = {name: local_tensor(parameter) for name, parameter in adapter_weights(model).items()}
    saved = {name: tensor.clone() for name, tensor in own.items()}
    _copy_weights(own, weights)
    has_tower = bool(trained_tower_weights(model))
    if has_tower:
        drop_features(model)
    try:
        yield
    finally:
        _copy_weights(own, saved)
        if has_tower:
            drop_features(model)


def _copy_weights(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        # Through `data`, which autograd does not track: otherwise a graph that saved the parameter could not run its backward.
        tensor.data.copy_(local_tensor(weights[name]))


@torch.no_grad()
def merged_tensors(model: Decoder, wide: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face's names with the adapters merged: W + scale B A.

    The sum is computed in float32 at least and rounded once to the model's dtype, or not at all if `wide`.
    """
    if model.lora is not None and writer_rank_of(model).count > 1:
        raise UserError(
            "the adapters of a model that is divided over processes cannot be merged: merge a saved adapter (burnish export)"
        )
    deltas = {
        (f"layers.{index}.{projection.module}.weight", projection.start): (a, b)
        for index, projection, a, b in adapters(model)
    }
    for block, (name, tensor) in zip(weight_blocks(model.arch), hf_tensors(model), strict=True):
        if model.lora is not None and (block.parameter_name, block.start) in deltas:
            a, b = (
                x.to(torch.promote_types(x.dtype, torch.float32)) for x in deltas[block.parameter_name, block.start]
            )
            merged = tensor.to(a.dtype) + model.lora.scale * (b @ a)
            tensor = merged if wide else merged.to(tensor.dtype)
        yield name, tensor
