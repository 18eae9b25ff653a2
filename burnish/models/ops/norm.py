"""Root-mean-square normalisation (Zhang and Sennrich, 1910.07467) with a backward of few memory passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.ops.cpu import rows
from burnish.models.ops.cpu.build import kernels

WIDE = (torch.float32, torch.float64)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        ctx.shift, ctx.library = shift, kernels(x, weight)
        if ctx.library is not None:
            x = x.contiguous()
            y, scale = rows.norm(ctx.library, x, weight, eps, shift)
            ctx.save_for_backward(x, scale, weight)
            return y
        scale = _scale(x, eps)
        normal = x * scale
        ctx.save_for_backward(normal, scale, weight)
        return normal * _shifted(weight, shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        normal, scale, weight = ctx.saved_tensors
        if ctx.library is not None:
            return *rows.norm_backward(ctx.library, grad.contiguous(), normal, weight, scale, ctx.shift), None, None
        grad_weight = (grad * normal).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        # d x = scale * (g - normal * mean(g * normal)), g the gradient of the normalised input
        slope = grad * _shifted(weight, ctx.shift)
        mean = torch.linalg.vecdot(slope, normal).unsqueeze(-1).div_(-normal.shape[-1])
        return slope.addcmul_(normal, mean).mul_(scale), grad_weight, None, None


class _HalfRmsNorm(torch.autograd.Function):
    """The same in half types, computed in float32: 1 + weight has too few digits in bfloat16. Keeps its input and a scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        ctx.shift = shift
        return (wide * scale * (weight.float() + shift)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, weight = ctx.saved_tensors
        grad, normal = grads[0].float(), x.float() * scale
        grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        slope = grad * (weight.float() + ctx.shift)
        mean = (slope * normal).mean(-1, keepdim=True)
        return ((slope - normal * mean) * scale).to(x.dtype), grad_weight, None, None


def _scale(x: Tensor, eps: float) -> Tensor:
    """[..., 1] one over the root of the mean square."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _shifted(weight: Tensor, shift: float) -> Tensor:
    return weight + shift if shift else weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """x / rms(x) * (shift + weight) over the last dimension, without gradient."""
    # For few rows on a CPU torch's own takes half as long again; the compiler fuses it.
    if x.device.type == "cpu" and x.dtype in WIDE and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        library = kernels(x, weight)
        if library is not None:
            return rows.norm(library, x.contiguous(), weight, eps, shift)[0]
        return (x * _scale(x, eps)).mul_(_shifted(weight, shift))
    if not shift:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.rms_norm(x.to(wide), weight.shape, weight.to(wide) + shift, eps).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's module, with a weight that may be counted from 1; float32 and float64 train through the function above, half
    types through torch's own where nothing is shifted."""

    def __init__(self, size: int, eps: float, shift: float = 0.0) -> None:
        super().__init__(size, eps)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.dtype in WIDE:
            return _RmsNorm.apply(x, self.weight, self.eps, self.shift)
        if torch.is_grad_enabled() and self.shift:
            return _HalfRmsNorm.apply(x, self.weight, self.eps, self.shift)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps, self.shift)
