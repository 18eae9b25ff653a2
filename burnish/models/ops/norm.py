"""Root-mean-square normalisation (Zhang and Sennrich, 1910.07467) with a backward of few memory passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normal = x * scale
        ctx.save_for_backward(normal, scale, weight)
        return normal * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        normal, scale, weight = ctx.saved_tensors
        grad_weight = (grad * normal).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        # d x = scale * (g - normal * mean(g * normal)), g the gradient of the normalised input
        slope = grad * weight
        mean = torch.linalg.vecdot(slope, normal).unsqueeze(-1).div_(-normal.shape[-1])
        return slope.addcmul_(normal, mean).mul_(scale), grad_weight, None


class RMSNorm(nn.RMSNorm):
    """torch's module; float32 and float64 train through the function above, half types through torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.dtype in (torch.float32, torch.float64):
            return _RmsNorm.apply(x, self.weight, self.eps)
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
