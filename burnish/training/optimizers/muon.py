"""Muon (Jordan et al., 2024): momentum whose singular values are all made about 1, for the matrices of layers.

    m <- m + (1 - 0.95) (g - m)
    u <- g + 0.95 (m - g)                                      Nesterov's look ahead
    w <- w - lr (0.2 sqrt(max(rows, columns)) orthogonal(u) + decay w)

The factor gives an update the size that one of AdamW has, so that its learning rates and decays carry over (Moonlight,
2502.16982). Matrices that we store as one, such as queries, keys and values, are orthogonalised one by one.
Embedding, head, norms and biases are AdamW's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.local import local
from burnish.training.optimizers.adamw import adam_moments, fused_adamw
from burnish.training.optimizers.base import Optimizer
from burnish.training.optimizers.offload import Spec
from burnish.training.optimizers.parts import Part
from burnish.training.optimizers.shards import part_of, whole

MOMENTUM = 0.95
UPDATE_SIZE = 0.2
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients that bring every singular value above 0.001 to between 0.68 and 1.14 in five steps."""
OUTSIDE = re.compile(r"(^|[._])(embed\w*|emb|wte|wpe|score|\w*head)($|[._])")
"""Matrices that are no map from hidden states to hidden states: embeddings and heads."""


def orthogonalised(matrix: Tensor, steps: int = 5) -> Tensor:
    """U f(S) V^T of a matrix U S V^T, with all of f(S) about 1.

    Newton-Schulz: matrix products alone, in bfloat16 on a GPU, where the rounding is far below the spread of f(S).
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix / torch.linalg.matrix_norm(matrix).clamp_min(torch.finfo(matrix.dtype).tiny)
    x = (x.T if is_tall else x).to(torch.bfloat16 if matrix.is_cuda else matrix.dtype)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def update_of(matrix: Tensor) -> Tensor:
    """The orthogonalised matrix, as large as an update of AdamW: entries of `UPDATE_SIZE` in the quadratic mean."""
    return orthogonalised(matrix).mul_(UPDATE_SIZE * math.sqrt(max(matrix.shape)))


@dataclass(frozen=True)
class Fused:
    """Several matrices with as many columns that are one parameter."""

    heights: Sequence[int]
    order: Tensor | None = None
    """Row i of the parameter is row order[i] of the matrices one below the other; None where it is row i."""

    def split(self, rows: Tensor) -> list[Tensor]:
        """The matrices."""
        return list((rows if self.order is None else rows[self.order.argsort()]).split(list(self.heights)))

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        rows = torch.cat(list(matrices))
        return rows if self.order is None else rows[self.order]


class Muon(Optimizer):
    """Momentum for the matrices of layers, AdamW's moments for the rest.

    `fused` says of which matrices a parameter consists, for those of more than one.
    """

    def __init__(self, *args: Any, fused: Mapping[str, Fused] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fused = dict(fused or {})
        if not any(self.is_whole(name) for name in self.parameters):
            raise UserError("optimizer.name=muon: no parameter that is trained is a matrix of a layer; use adamw")

    def is_whole(self, name: str) -> bool:
        """A matrix of a layer: its rows are orthogonalised together."""
        parameter = self.parameters[name]
        return parameter.dim() == 2 and min(parameter.shape) > 1 and not OUTSIDE.search(name)

    def moments(self, name: str) -> dict[str, Spec]:
        """One number where AdamW has two, for the matrices of layers."""
        if not self.is_whole(name):
            return adam_moments(self, name)
        return {"momentum": (tuple(local(self.parameters[name]).shape), self.wide_type(name))}

    def update(self, parts: Sequence[Part]) -> None:
        """Matrices of layers one by one, the rest together."""
        fused_adamw([part for part in parts if "momentum" not in part.state], self.config)
        for part in parts:
            if "momentum" in part.state:
                self._update_matrix(part)

    def _update_matrix(self, part: Part) -> None:
        name, momentum = part.span.name, part.state["momentum"]
        momentum.lerp_(part.gradient, 1 - MOMENTUM)
        ahead = whole(part.gradient.lerp(momentum, MOMENTUM), self.parameters[name])
        fused = self.fused.get(name, Fused([len(ahead)]))
        update = fused.join([update_of(matrix) for matrix in fused.split(ahead)])
        if part.decay:
            part.weight.mul_(1 - part.lr * part.decay)
        part.weight.add_(part_of(update, self.parameters[name]), alpha=-part.lr)
