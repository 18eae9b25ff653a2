"""A frozen linear layer with low-rank adapters on blocks of its outputs (LoRA, 2106.09685).

    y_i = W_i x + scale B_i A_i x

for each block i of rows of W that has an adapter: query, key and value of a fused projection have one each, as in Hugging
Face's unfused layers. All A's are one matrix, so that x is read once; each B adds into its columns of y. The backward keeps
x and A x alone, and computes no gradient for W, which may be in 4 bits (`ops/nf4.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.ops.nf4 import Nf4, Nf4Weight, dense, linear

Span = tuple[int, int]
"""Outputs [start, stop) that one adapter adds to."""


def add_blocks_(y: Tensor, z: Tensor, b: Tensor, spans: Sequence[Span], scale: float) -> Tensor:
    """y[:, span_i] += scale z_i B_i^T, with z [N, blocks * rank] and the B's one below the other [outputs of the blocks, rank]."""
    row = 0
    for (start, stop), part in zip(spans, z.split(b.shape[1], 1), strict=True):
        y[:, start:stop].addmm_(part, b[row : row + stop - start].t(), alpha=scale)
        row += stop - start
    return y


class _Lora(torch.autograd.Function):
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
    ) -> Tensor:
        plain = [weight] if isinstance(weight, Tensor) else []
        if any(frozen is not None and frozen.requires_grad for frozen in (*plain, bias)):
            raise RuntimeError("the weight under an adapter is frozen, and its gradient is never computed")
        z = functional.linear(x, a)  # [N, blocks * rank]
        ctx.save_for_backward(x, z, a, b, *plain)
        ctx.spans, ctx.scale, ctx.matrix = spans, scale, None if plain else weight
        return add_blocks_(functional.linear(x, dense(weight, x.dtype), bias), z, b, spans, scale)

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
            grad_x = (grad @ dense(plain[0] if plain else ctx.matrix, grad.dtype)).addmm_(grad_z, a)
        return grad_x, None, None, grad_z.t() @ x, grad_b, None, None


class LoraLinear(nn.Linear):
    """The linear layer `base`, its own tensors frozen, with an adapter on each of the `spans` of its outputs.

    `lora_a` [blocks * rank, in] holds the A's one below the other, `lora_b` [outputs of the blocks, rank] the B's, both in
    the type of the weight, or `dtype`: what the engine multiplies by is then what the learner trains. They start as zeros.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    weight: Tensor | Nf4Weight  # type: ignore[assignment]  # torch's Linear declares a tensor; in 4 bits it is a module

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
        """Whether the adapter takes part; without it the layer is `base`."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] rows to [N, out]."""
        weight = self.weight.matrix if isinstance(self.weight, Nf4Weight) else self.weight
        return self.product(x, weight, self.bias, self.lora_a, self.lora_b)

    def product(self, x: Tensor, weight: Tensor | Nf4, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        """The same by these tensors."""
        if self.is_on and torch.is_grad_enabled():
            return _Lora.apply(x, weight, bias, a, b, self.spans, self.scale)
        y = linear(x, weight, bias)
        return add_blocks_(y, functional.linear(x, a), b, self.spans, self.scale) if self.is_on else y

    def blocks(self) -> list[tuple[Span, Tensor, Tensor]]:
        """The outputs, A [rank, in] and B [outputs, rank] of each adapter, as views."""
        rows = self.lora_b.split([stop - start for start, stop in self.spans])
        return list(zip(self.spans, self.lora_a.split(self.rank), rows, strict=True))
