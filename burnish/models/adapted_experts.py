"""Products with frozen experts, which may be in 4 bits and may have an adapter for each expert and projection.

    y = W_e x + scale B_e A_e x        for a row x of expert e

The adapters of all experts are two stacked parameters: `a` [experts * adapters * rank, inputs] and `b` [experts * their outputs,
rank]. The products with them are grouped products too. The backward pass saves the input and A x and computes no gradient of W,
which is dequantised again there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.models.experts import Dispatch
from burnish.models.kernels.grouped_products import (
    grouped_input_gradient,
    grouped_product,
    grouped_weight_gradient,
    sum_slots,
)

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [M, in], matrices [E, out, in], ends [E]) -> [M, out]."""


@dataclass(frozen=True)
class FrozenExperts:
    """The frozen matrices of all experts, and where their adapters add to the outputs."""

    matrices: Callable[[torch.dtype], Tensor]
    """Returns the matrices [experts, outputs, inputs]; those in 4 bits are dequantised by each call."""
    num_experts: int
    spans: tuple[tuple[int, int], ...] = ()
    """Outputs [start, stop) of each adapter of an expert; empty without adapters."""
    rank: int = 0
    scale: float = 1.0

    def stacked(self, adapters: Tensor) -> Tensor:
        """Adapter matrices [experts, ..., columns] from a stacked parameter."""
        return adapters.view(self.num_experts, -1, adapters.shape[-1])

    def blocks(self, z: Tensor, b: Tensor) -> list[tuple[slice, Tensor, Tensor]]:
        """(outputs, A x [M, rank], B [experts, outputs, rank]) of each adapter."""
        stacked, found, row = self.stacked(b), [], 0
        for (start, stop), part in zip(self.spans, z.split(self.rank, 1), strict=True):
            found.append((slice(start, stop), part, stacked[:, row : row + stop - start]))
            row += stop - start
        return found

    def product(
        self, rows: Tensor, a: Tensor | None, b: Tensor | None, ends: Tensor, product: Product
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs [M, out] of sorted rows, and A x [M, adapters * rank]."""
        y = product(rows, self.matrices(rows.dtype), ends)
        if a is None or b is None:
            return y, None
        z = product(rows, self.stacked(a), ends)
        for where, part, matrices in self.blocks(z, b):
            y[:, where] += self.scale * product(part.contiguous(), matrices, ends)
        return y, z


def from_tokens(x: Tensor, a: Tensor | None, b: Tensor | None, way: Dispatch, frozen: FrozenExperts) -> Tensor:
    """The product of each sorted row: tokens [N, inputs] -> [M, outputs]."""
    return _FrozenProduct.apply(x, a, b, way, frozen, True)


def to_tokens(rows: Tensor, a: Tensor | None, b: Tensor | None, way: Dispatch, frozen: FrozenExperts) -> Tensor:
    """The sum of each token's products: sorted rows [M, inputs] -> [N, outputs]."""
    return _FrozenProduct.apply(rows, a, b, way, frozen, False)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor | None, b: Tensor | None, way: Dispatch, frozen: FrozenExperts, gathers: bool
    ) -> Tensor:
        y, z = frozen.product(x[way.tokens] if gathers else x, a, b, way.ends, grouped_product)
        ctx.frozen, ctx.gathers = frozen, gathers
        ctx.save_for_backward(None if a is None else x, z, a, b, *way)
        return y if gathers else sum_slots(y, way.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, z, a, b, *indices = ctx.saved_tensors
        way, frozen = Dispatch(*indices), ctx.frozen
        grad = grads[0].contiguous() if ctx.gathers else grads[0][way.tokens]
        grad_a = grad_b = grad_z = grad_rows = None
        if a is not None:
            blocks = [(grad[:, where].contiguous(), part, m) for where, part, m in frozen.blocks(z, b)]
            parts = [grouped_weight_gradient(g, part.contiguous(), way.ends) for g, part, _ in blocks]
            grad_b = torch.cat(parts, 1).mul_(frozen.scale).view(b.shape)
            inner = [grouped_input_gradient(g, matrices, way.ends) for g, _, matrices in blocks]
            grad_z = torch.cat(inner, 1).mul_(frozen.scale)
            rows = x[way.tokens] if ctx.gathers else x
            grad_a = grouped_weight_gradient(grad_z, rows, way.ends).view(a.shape)
        if ctx.needs_input_grad[0]:
            grad_rows = grouped_input_gradient(grad, frozen.matrices(grad.dtype), way.ends)
            if grad_z is not None:
                grad_rows += grouped_input_gradient(grad_z, frozen.stacked(a), way.ends)
            grad_rows = sum_slots(grad_rows, way.rows) if ctx.gathers else grad_rows
        return grad_rows, grad_a, grad_b, None, None, None
