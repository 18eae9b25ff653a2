"""AdamW (Loshchilov and Hutter, 1711.05101) on torch's fused kernel.

The same arithmetic as `torch.optim.AdamW(fused=True)`, bit for bit, without its class: the first use of that imports
the whole compiler, two and a half seconds of every start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.model import Optimizer as Config
from burnish.core.sharded_tensors import local
from burnish.training.optimizers.offload import Spec
from burnish.training.optimizers.optimizer import BaseOptimizer
from burnish.training.optimizers.parameter_rows import Part, part_of, whole
from burnish.training.optimizers.settings import Fused


def fused_adamw(parts: Sequence[Part], config: Config) -> None:
    """One update of parts whose state has `exp_avg` and `exp_avg_sq`; their `step` counts this update already."""
    for lr, decay in dict.fromkeys((part.lr, part.decay) for part in parts):
        same = [part for part in parts if (part.lr, part.decay) == (lr, decay)]
        torch._fused_adamw_(
            [part.weight for part in same],
            [part.gradient for part in same],
            [part.state["exp_avg"] for part in same],
            [part.state["exp_avg_sq"] for part in same],
            [],
            [part.state["step"] for part in same],
            lr=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
        )


class AdamW(BaseOptimizer):
    """Both moments in float32, or in the type of a parameter that is wider."""

    def moments(self, name: str) -> dict[str, Spec]:
        """One number of each for every number of the parameter."""
        return adam_moments(self, name)

    def update(self, parts: Sequence[Part]) -> None:
        """One call for all parts of a learning rate and decay."""
        fused_adamw(parts, self.config)


def adam_moments(optimizer: BaseOptimizer, name: str) -> dict[str, Spec]:
    """The state of a parameter that AdamW updates."""
    spec = tuple(local(optimizer.parameters[name]).shape) or (1,), optimizer.wide_type(name)
    return {"exp_avg": spec, "exp_avg_sq": spec}


# --- Muon (Jordan et al., 2024): momentum whose singular values are all made about 1, for the matrices of layers.
#
#     m <- m + (1 - 0.95) (g - m)
#     u <- g + 0.95 (m - g)                                      Nesterov's look ahead
#     w <- w - lr (0.2 sqrt(max(rows, columns)) orthogonal(u) + decay w)
#
# The factor gives an update the size that one of AdamW has, so that its learning rates and decays carry over (Moonlight,
# 2502.16982). Matrices that we store as one, such as queries, keys and values, are orthogonalised one by one.
# Embedding, head, norms and biases are AdamW's.

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


class Muon(BaseOptimizer):
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
