"""A frozen linear layer with low-rank adapters on blocks of its outputs (LoRA, 2106.09685).

    y_i = W_i x + scale B_i A_i x

for each block i of rows of W that has an adapter: query, key and value of a fused projection have one each, as in Hugging
Face's unfused layers. All A's are one matrix, so that x is read once; each B adds into its columns of y. The backward keeps
x and A x alone, and computes no gradient for W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        spans: Sequence[Span],
        scale: float,
    ) -> Tensor:
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            raise RuntimeError("the weight under an adapter is frozen, and its gradient is never computed")
        z = functional.linear(x, a)  # [N, blocks * rank]
        ctx.save_for_backward(x, z, weight, a, b)
        ctx.spans, ctx.scale = spans, scale
        return add_blocks_(functional.linear(x, weight, bias), z, b, spans, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, z, weight, a, b = ctx.saved_tensors
        parts = [grad[:, start:stop] for start, stop in ctx.spans]
        rows = b.split([stop - start for start, stop in ctx.spans])
        grad_b = torch.cat([p.t() @ z_i for p, z_i in zip(parts, z.split(b.shape[1], 1), strict=True)]).mul_(ctx.scale)
        grad_z = torch.cat([p @ b_i for p, b_i in zip(parts, rows, strict=True)], 1).mul_(ctx.scale)
        grad_x = (grad @ weight).addmm_(grad_z, a) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_z.t() @ x, grad_b, None, None


class LoraLinear(nn.Linear):
    """The linear layer `base`, its own tensors frozen, with an adapter on each of the `spans` of its outputs.

    `lora_a` [blocks * rank, in] holds the A's one below the other, `lora_b` [outputs of the blocks, rank] the B's, both in
    the type of the weight: what the engine multiplies by is then what the learner trains. They start as zeros.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(self, base: nn.Linear, spans: Sequence[Span], rank: int, scale: float) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.spans, self.rank, self.scale = tuple(spans), rank, scale
        outputs = sum(stop - start for start, stop in spans)
        self.lora_a = nn.Parameter(self.weight.new_zeros(len(self.spans) * rank, self.in_features))
        self.lora_b = nn.Parameter(self.weight.new_zeros(outputs, rank))
        self.is_on = True
        """Whether the adapter takes part; without it the layer is `base`."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] rows to [N, out]."""
        if not self.is_on:
            return functional.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled():
            return _Lora.apply(x, self.weight, self.bias, self.lora_a, self.lora_b, self.spans, self.scale)
        y, z = functional.linear(x, self.weight, self.bias), functional.linear(x, self.lora_a)
        return add_blocks_(y, z, self.lora_b, self.spans, self.scale)

    def blocks(self) -> list[tuple[Span, Tensor, Tensor]]:
        """The outputs, A [rank, in] and B [outputs, rank] of each adapter, as views."""
        rows = self.lora_b.split([stop - start for start, stop in self.spans])
        return list(zip(self.spans, self.lora_a.split(self.rank), rows, strict=True))
