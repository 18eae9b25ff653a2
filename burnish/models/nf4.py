"""Frozen matrices in 4 bits: NF4, the quantiles of a normal distribution (QLoRA, 2305.14314), and decoders made of them.

A matrix is divided row by row into blocks of 64 numbers. A block's scale is its largest magnitude in float32; each number
divided by the scale becomes the nearest of 16 values: 4.5 bits per number. With `double` quantisation the scales become
8-bit integers between the smallest and the largest of 256 scales: 4.13 bits.

    w = NF4_VALUES[code] * scale                 (in float32, rounded once to the compute dtype)
    scale = low + step * code                    (double)

A dense matrix exists only during a product. It is dequantised in the forward and again in the backward pass, which saves
nothing. All products, the learner's and the engine's, use the same numbers w.

In a decoder only the layers' matrices are quantised; embedding, output head, norms and biases keep the model's dtype. An
`Nf4Weight` is a module with the name of the parameter that it replaces, so that it is found by that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.core.pipeline_stage import stage_of
from burnish.models import adapted_experts
from burnish.models.adapted_experts import FrozenExperts
from burnish.models.decoder import Decoder
from burnish.models.experts import Dispatch, ExpertLinear
from burnish.models.kernels.device import use_triton
from burnish.models.weight_layout import layer_matrices, replace_module

if TYPE_CHECKING:
    from burnish.config.model import LoraBase


NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4_BLOCK = 64
"""Numbers per scale."""
SCALES_PER_GROUP = 256
"""Scales per range, with double quantisation."""
SCALE_STEPS = 255
QUANTISE_CHUNK = 1 << 24
"""Numbers quantised at once; the temporaries take several times their memory."""


class Nf4(NamedTuple):
    """A matrix [outputs, inputs] in 4 bits."""

    codes: Tensor
    """[blocks * 32] bytes of two numbers each, the first in the upper four bits."""
    scales: Tensor
    """[blocks] float32, or bytes with double quantisation."""
    ranges: Tensor | None
    """[groups, 2] float32: the smallest scale of a group and the step between codes; None without double quantisation."""
    shape: tuple[int, int]


def quantise_nf4(weight: Tensor, double: bool) -> Nf4:
    """Quantise a matrix; the last block is padded with 0."""
    flat = weight.detach().reshape(-1)
    parts = [
        _quantise_blocks(functional.pad(part, (0, -part.numel() % NF4_BLOCK)).float())
        for part in flat.split(QUANTISE_CHUNK)
    ]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    shape = (weight.shape[0], weight.shape[1])
    if not double:
        return Nf4(codes, scales, None, shape)
    groups = functional.pad(scales[None], (0, -scales.numel() % SCALES_PER_GROUP), mode="replicate").view(
        -1, SCALES_PER_GROUP
    )
    low, high = groups.aminmax(dim=1)
    step = (high - low) / torch.full_like(high, SCALE_STEPS)  # a GPU rounds division by a Python number differently
    number = (groups - low[:, None]) / torch.where(step > 0, step, 1.0)[:, None]
    whole = number.round_().to(torch.uint8).view(-1)[: scales.numel()].clone()
    return Nf4(codes, whole, torch.stack([low, step], 1), shape)


def _quantise_blocks(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of complete blocks."""
    blocks = flat.view(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1)
    unit = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    index = torch.bucketize(unit, _midpoints(flat.device), out_int32=True).to(torch.uint8).view(-1, 2)
    return index[:, 0].bitwise_left_shift(4).bitwise_or_(index[:, 1]), scales


def dequantise_nf4(matrix: Nf4, dtype: torch.dtype) -> Tensor:
    """The dense matrix [outputs, inputs]."""
    is_plain = dtype == torch.float64 or torch.compiler.is_compiling()  # torch.compile fuses the code below
    if use_triton(matrix.codes) and not is_plain:
        from burnish.models.kernels.triton import elementwise_kernels as kernel

        return kernel.dequantise_nf4(matrix, _value_table(matrix.codes.device), dtype, NF4_BLOCK, SCALES_PER_GROUP)
    wide = torch.promote_types(dtype, torch.float32)
    found = functional.embedding(matrix.codes.int(), _byte_values(matrix.codes.device, wide)).view(-1, NF4_BLOCK)
    found *= block_scales(matrix)[:, None]
    outputs, inputs = matrix.shape
    return found.view(-1)[: outputs * inputs].view(outputs, inputs).to(dtype)


def block_scales(matrix: Nf4) -> Tensor:
    """The scales [blocks] in float32."""
    if matrix.ranges is None:
        return matrix.scales
    low, step = matrix.ranges.repeat_interleave(SCALES_PER_GROUP, 0)[: matrix.scales.numel()].unbind(1)
    return low + step * matrix.scales


@cache
def _value_table(device: torch.device) -> Tensor:
    return torch.tensor(NF4_VALUES, device=device)


@cache
def _midpoints(device: torch.device) -> Tensor:
    """Midpoints [15] between neighbouring values."""
    wide = torch.tensor(NF4_VALUES, dtype=torch.float64)
    return ((wide[1:] + wide[:-1]) / 2).float().to(device)


@cache
def _byte_values(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two numbers of each byte, [256, 2]."""
    values = torch.tensor(NF4_VALUES).to(device, dtype)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)


class _Nf4LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Nf4, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return functional.linear(x, dequantise_nf4(matrix, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ dequantise_nf4(ctx.matrix, grads[0].dtype), None, None


def nf4_linear(x: Tensor, matrix: Tensor | Nf4, bias: Tensor | None) -> Tensor:
    """Apply an NF4 or dense matrix to rows [N, inputs]; [N, outputs]. With NF4 the gradient flows only to x."""
    if isinstance(matrix, Tensor):
        return functional.linear(x, matrix, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Nf4LinearFunction.apply(x, matrix, bias)
    return functional.linear(x, dequantise_nf4(matrix, x.dtype), bias)


# --- modules ---


class Nf4Weight(nn.Module):
    """A frozen NF4 matrix in place of a linear layer's weight."""

    codes: Tensor
    scales: Tensor
    ranges: Tensor | None

    def __init__(self, shape: tuple[int, int], double: bool, device: torch.device | None = None) -> None:
        super().__init__()
        self.shape, self.is_double = shape, double
        blocks = -(-shape[0] * shape[1] // NF4_BLOCK)
        # Floats are stored as integers of the same size, because `module.to(dtype)` would round float buffers.
        kinds = torch.uint8 if double else torch.int32
        ranges = torch.empty(-(-blocks // SCALES_PER_GROUP), 2, dtype=torch.int32, device=device) if double else None
        self.register_buffer("codes", torch.empty(blocks * NF4_BLOCK // 2, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(blocks, dtype=kinds, device=device))
        self.register_buffer("ranges", ranges)

    @property
    def matrix(self) -> Nf4:
        """The matrix as an `Nf4`."""
        if self.ranges is None:
            return Nf4(self.codes, self.scales.view(torch.float32), None, self.shape)
        return Nf4(self.codes, self.scales, self.ranges.view(torch.float32), self.shape)

    def write(self, weight: Tensor) -> None:
        """Quantise a dense matrix into this weight."""
        for mine, new in zip(self.matrix[:3], quantise_nf4(weight, self.is_double)[:3], strict=True):
            if isinstance(mine, Tensor) and isinstance(new, Tensor):
                mine.copy_(new)


class Nf4Linear(nn.Linear):
    """A linear layer with an NF4 weight, quantised from `base` unless `base` is on the meta device."""

    weight: Nf4Weight  # type: ignore[assignment]  # torch's Linear declares a tensor; adapters need a Linear

    def __init__(self, base: nn.Linear, double: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self.weight = Nf4Weight((base.out_features, base.in_features), double, base.weight.device)
        if not base.weight.is_meta:
            self.weight.write(base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to rows [N, in]; [N, out]."""
        return nf4_linear(x, self.weight.matrix, self.bias)


class Nf4ExpertLinear(Nf4Linear):
    """The matrices of all experts in NF4."""

    def __init__(self, base: ExpertLinear, double: bool) -> None:
        super().__init__(base, double)
        self.num_experts = base.num_experts

    def frozen(self) -> FrozenExperts:
        """The matrices for a product."""
        return FrozenExperts(self.matrices, self.num_experts)

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """The dense matrices [experts, outputs, inputs]."""
        return dequantise_nf4(self.weight.matrix, dtype).view(self.num_experts, -1, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the rows of an expert layer have an expert each: call `from_tokens` or `to_tokens`")

    def from_tokens(self, x: Tensor, way: Dispatch) -> Tensor:
        """As `ExpertLinear.from_tokens`."""
        return adapted_experts.from_tokens(x, None, None, way, self.frozen())

    def to_tokens(self, rows: Tensor, way: Dispatch) -> Tensor:
        """As `ExpertLinear.to_tokens`."""
        return adapted_experts.to_tokens(rows, None, None, way, self.frozen())


def dense_weight(weight: Tensor | Nf4 | Nf4Weight, dtype: torch.dtype) -> Tensor:
    """A weight as a dense matrix."""
    if isinstance(weight, Tensor):
        return weight
    return dequantise_nf4(weight.matrix if isinstance(weight, Nf4Weight) else weight, dtype)


# --- decoders ---


def quantise_layers(model: Decoder, base: LoraBase) -> None:
    """Quantise the matrices of all layers if `base` is an NF4 format; quantised ones are left unchanged."""
    if base == "dtype":
        return
    for index, layer in enumerate(model.layers):
        for name in layer_matrices(model.arch, index):
            linear = cast(nn.Linear, layer.get_submodule(name))
            if isinstance(linear.weight, Tensor):
                is_double = base == "nf4-double"
                experts = Nf4ExpertLinear(linear, is_double) if isinstance(linear, ExpertLinear) else None
                replace_module(layer, name, experts or Nf4Linear(linear, is_double))


def quantised_weights(model: nn.Module) -> dict[str, Nf4Weight]:
    """The NF4 matrices by the names of the parameters that they replace."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Nf4Weight)}


def quantised_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of the NF4 matrices by name. With the parameters they are the whole state of the model."""
    return {
        f"{name}.{key}": t for name, weight in quantised_weights(model).items() for key, t in weight.named_buffers()
    }


def num_quantised_parameters(model: nn.Module) -> int:
    """Number of quantised weights."""
    return sum(weight.shape[0] * weight.shape[1] for weight in quantised_weights(model).values())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers of a model."""
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def dequantise_bytes(model: Decoder, on_gpu: bool) -> int:
    """Bytes needed to dequantise the largest NF4 matrix for a product; without a kernel they include indices."""
    largest = max((w.shape[0] * w.shape[1] for w in quantised_weights(model).values()), default=0)
    return largest * (model.embedding.weight.itemsize if on_gpu else 6)


def weight_shapes(model: Decoder) -> dict[str, Tensor]:
    """A tensor with the shape and dtype of each weight by name: the parameter, or a meta tensor for an NF4 matrix."""
    dtype = model.embedding.weight.dtype
    without = {n: torch.empty(w.shape, dtype=dtype, device="meta") for n, w in quantised_weights(model).items()}
    stage = stage_of(model)
    elsewhere = {} if stage is None else {name: tensor.meta() for name, tensor in stage.tensors.items()}
    return elsewhere | dict(model.named_parameters()) | without


class _WeightsByName(Mapping[str, Tensor]):
    """Mapping of a model's weight names; subclasses define the values."""

    def __init__(self, model: Decoder) -> None:
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.quantised, self.dtype = quantised_weights(model), model.embedding.weight.dtype

    def __iter__(self) -> Iterator[str]:
        yield from self.parameters
        yield from self.quantised

    def __len__(self) -> int:
        return len(self.parameters) + len(self.quantised)


class DenseWeights(_WeightsByName):
    """Weights for reading: parameters, and NF4 matrices dequantised on access."""

    def __getitem__(self, name: str) -> Tensor:
        return dense_weight(self.quantised[name], self.dtype) if name in self.quantised else self.parameters[name]


class WeightsToFill(_WeightsByName):
    """Weights for loading: parameters, and for each NF4 matrix a dense buffer until it is filled.

    The buffer is in float32, so that the file's numbers are quantised without rounding to the model's dtype first.
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
        """Quantise a weight that has been filled completely."""
        if name in self.waiting:
            self.quantised[name].write(self.waiting.pop(name))
