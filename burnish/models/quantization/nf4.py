"""Frozen matrices in 4 bits: NF4, the quantiles of a normal distribution, in blocks with a scale each (QLoRA, 2305.14314).

A matrix, read row by row, is cut into blocks of 64 numbers. Of each block the largest magnitude is kept as its scale in
float32, and of each number over it which of 16 values is nearest: 4.5 bits a number. In `double` form the scales are whole
numbers of 8 bits between the least and the largest of 256 of them: 4.13 bits.

    w = VALUES[code] scale                       (in float32, rounded once to the type of the arithmetic)
    scale = low + step code                      (double)

There is one dense matrix for a moment where a product needs it, made anew in the forward and in the backward pass, which
keeps nothing of it. Every product, the learner's and the engine's, is by the same numbers w.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.kernels.device import use_kernels

VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4_BLOCK = 64
"""Numbers with one scale."""
GROUP = 256
"""Scales with one range."""
STEPS = 255
CHUNK = 1 << 24
"""Numbers that are quantised at once: what is computed beside them takes several times their memory."""


class Nf4(NamedTuple):
    """A matrix [outputs, inputs] in 4 bits."""

    codes: Tensor
    """[blocks * 32] bytes: two numbers each, the first in the upper half."""
    scales: Tensor
    """[blocks] float32, or bytes where there are ranges."""
    ranges: Tensor | None
    """[groups, 2] float32: the least of a group's scales, and the step between two codes."""
    shape: tuple[int, int]


def quantise(weight: Tensor, double: bool) -> Nf4:
    """A matrix in 4 bits; what a last block lacks is 0."""
    flat = weight.detach().reshape(-1)
    parts = [_blocks(functional.pad(part, (0, -part.numel() % NF4_BLOCK)).float()) for part in flat.split(CHUNK)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    shape = (weight.shape[0], weight.shape[1])
    if not double:
        return Nf4(codes, scales, None, shape)
    groups = functional.pad(scales[None], (0, -scales.numel() % GROUP), mode="replicate").view(-1, GROUP)
    low, high = groups.aminmax(dim=1)
    step = (high - low) / torch.full_like(high, STEPS)  # by a plain number a GPU divides otherwise, in the last bit
    number = (groups - low[:, None]) / torch.where(step > 0, step, 1.0)[:, None]
    whole = number.round_().to(torch.uint8).view(-1)[: scales.numel()].clone()
    return Nf4(codes, whole, torch.stack([low, step], 1), shape)


def _blocks(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of whole blocks."""
    blocks = flat.view(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1)
    unit = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    index = torch.bucketize(unit, _middles(flat.device), out_int32=True).to(torch.uint8).view(-1, 2)
    return index[:, 0].bitwise_left_shift(4).bitwise_or_(index[:, 1]), scales


def dequantise(matrix: Nf4, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] the numbers that the codes stand for."""
    is_plain = dtype == torch.float64 or torch.compiler.is_compiling()  # the compiler fuses what is below by itself
    if use_kernels(matrix.codes) and not is_plain:
        from burnish.models.kernels.triton import nf4 as kernel

        return kernel.dequantise(matrix, _values(matrix.codes.device), dtype, NF4_BLOCK, GROUP)
    wide = torch.promote_types(dtype, torch.float32)
    found = functional.embedding(matrix.codes.int(), _pairs(matrix.codes.device, wide)).view(-1, NF4_BLOCK)
    found *= whole_scales(matrix)[:, None]
    outputs, inputs = matrix.shape
    return found.view(-1)[: outputs * inputs].view(outputs, inputs).to(dtype)


def whole_scales(matrix: Nf4) -> Tensor:
    """[blocks] the scales in float32."""
    if matrix.ranges is None:
        return matrix.scales
    low, step = matrix.ranges.repeat_interleave(GROUP, 0)[: matrix.scales.numel()].unbind(1)
    return low + step * matrix.scales


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, device=device)


@cache
def _middles(device: torch.device) -> Tensor:
    """[15] where the nearer of two values changes."""
    wide = torch.tensor(VALUES, dtype=torch.float64)
    return ((wide[1:] + wide[:-1]) / 2).float().to(device)


@cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2] the two numbers of a byte."""
    values = torch.tensor(VALUES).to(device, dtype)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)


# --- products ------------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Nf4, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return functional.linear(x, dequantise(matrix, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ dequantise(ctx.matrix, grads[0].dtype), None, None


def linear(x: Tensor, matrix: Tensor | Nf4, bias: Tensor | None) -> Tensor:
    """Rows [N, inputs] to [N, outputs] by a matrix in 4 bits or in the type of x; from 4 bits a gradient goes to x alone."""
    if isinstance(matrix, Tensor):
        return functional.linear(x, matrix, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Linear.apply(x, matrix, bias)
    return functional.linear(x, dequantise(matrix, x.dtype), bias)


# --- as modules ----------------------------------------------------------------------------------------------------------


class Nf4Weight(nn.Module):
    """What stands where a linear layer has its weight: a matrix in 4 bits, which nothing trains."""

    codes: Tensor
    scales: Tensor
    ranges: Tensor | None

    def __init__(self, shape: tuple[int, int], double: bool, device: torch.device | None = None) -> None:
        super().__init__()
        self.shape, self.is_double = shape, double
        blocks = -(-shape[0] * shape[1] // NF4_BLOCK)
        # Floats lie as whole numbers of as many bits: a module that is given another type would round them.
        kinds = torch.uint8 if double else torch.int32
        ranges = torch.empty(-(-blocks // GROUP), 2, dtype=torch.int32, device=device) if double else None
        self.register_buffer("codes", torch.empty(blocks * NF4_BLOCK // 2, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(blocks, dtype=kinds, device=device))
        self.register_buffer("ranges", ranges)

    @property
    def matrix(self) -> Nf4:
        """The matrix."""
        if self.ranges is None:
            return Nf4(self.codes, self.scales.view(torch.float32), None, self.shape)
        return Nf4(self.codes, self.scales, self.ranges.view(torch.float32), self.shape)

    def write(self, weight: Tensor) -> None:
        """Become the 4 bits of a matrix."""
        for mine, new in zip(self.matrix[:3], quantise(weight, self.is_double)[:3], strict=True):
            if isinstance(mine, Tensor) and isinstance(new, Tensor):
                mine.copy_(new)


class Nf4Linear(nn.Linear):
    """A linear layer whose weight is in 4 bits; that of `base`, where it has numbers already."""

    weight: Nf4Weight  # type: ignore[assignment]  # torch's Linear declares a tensor; adapters need a Linear

    def __init__(self, base: nn.Linear, double: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self.weight = Nf4Weight((base.out_features, base.in_features), double, base.weight.device)
        if not base.weight.is_meta:
            self.weight.write(base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] rows to [N, out]."""
        return linear(x, self.weight.matrix, self.bias)


def dense(weight: Tensor | Nf4 | Nf4Weight, dtype: torch.dtype) -> Tensor:
    """A weight as a matrix of plain numbers."""
    if isinstance(weight, Tensor):
        return weight
    return dequantise(weight.matrix if isinstance(weight, Nf4Weight) else weight, dtype)
