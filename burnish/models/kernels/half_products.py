"""Products of half-precision matrices whose sums or factors are in float32.

`add_to` and `add_product` add a half-precision matrix or product to a float32 sum, in one kernel where there is one.

The rest is for processors without bfloat16 instructions. There torch's bfloat16 product takes four times as long as its float32
product of many rows. The matrices are therefore widened for the product. Its sums are float32 in both cases, and so are its inputs
and outputs up to their rounding to bfloat16. Only bfloat16 tensors are saved for the backward pass. A processor with AVX512-BF16,
AMX or NEON's bfloat16 instructions runs torch's product.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from burnish.models.kernels.cpu import cpu_ops
from burnish.models.kernels.cpu.c_library import c_kernels

HALF_DTYPES = (torch.bfloat16, torch.float16)
MIN_ROWS = 32
"""Fewer rows are not worth widening the weight for."""
BFLOAT16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
"""Features of a processor with bfloat16 products, as /proc/cpuinfo names them."""


@cache
def processor_features() -> frozenset[str]:
    """Features of the processor that /proc/cpuinfo names, among its other words."""
    path = Path("/proc/cpuinfo")
    return frozenset(path.read_text().split()) if path.is_file() else frozenset()


def has_bfloat16_products() -> bool:
    """Whether the processor has bfloat16 instructions."""
    return bool(BFLOAT16_FEATURES & processor_features())


def is_slow_half(weight: Tensor) -> bool:
    """Whether products with a plain weight are computed in float32."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or type(weight) not in (Tensor, Parameter):
        return False
    return not torch.compiler.is_compiling() and not has_bfloat16_products()


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float32 if their products are slow, else as they are."""
    return tuple(x.float() for x in tensors) if all(map(is_slow_half, tensors)) else tensors


def add_to(total: Tensor, x: Tensor) -> None:
    """Add x to `total`. On a CPU torch would copy a bfloat16 tensor to float32 first; the C kernel does not."""
    library = None
    is_simple = type(total) is Tensor and total.is_contiguous() and x.is_contiguous() and total.shape == x.shape
    if is_simple and total.dtype == torch.float32:
        library = c_kernels(x, stored_in=(torch.bfloat16,))
    if library is None:
        total += x
    else:
        cpu_ops.add_half(library, total, x)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`. On a GPU the product of half-precision matrices is added to a float32 sum before it is rounded."""
    if total.dtype == a.dtype == b.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda and total.dtype == torch.float32 and a.dtype == b.dtype and a.dtype in HALF_DTYPES:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        add_to(total, a @ b)


class _HalfProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad, dtype = grads[0].float(), weight.dtype
        grad_x = (grad @ weight.float()).to(dtype) if ctx.needs_input_grad[0] else None
        grad_weight = (grad.t() @ x.float()).to(dtype) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(0).to(dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class Linear(nn.Linear):
    """`nn.Linear`, in float32 where bfloat16 products are slow."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[0] < MIN_ROWS or x.dtype != self.weight.dtype or not is_slow_half(self.weight):
            return super().forward(x)
        if torch.is_grad_enabled():
            found: Tensor = _HalfProduct.apply(x, self.weight, self.bias)
            return found
        return _product(x, self.weight, self.bias)


PLAIN_LINEARS = (nn.Linear, Linear)
"""Types of a linear layer that is nothing but a weight and a bias."""
