"""The gated half of an MLP without gradient: in one kernel where there is one, else a product and an activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from burnish.models.ops.cuda.gated_product import gated_product, has_gated_product


def gated_linear(module: nn.Linear, x: Tensor, activation: str, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """`activate`, which is called `activation`, of a gate-and-up layer on rows [N, in]: [N, out]."""
    if has_one_kernel(module, x, activation):
        return gated_product(x, module.weight, activation)
    return activate(module(x))


def has_one_kernel(module: nn.Linear, x: Tensor, activation: str) -> bool:
    """Whether one kernel makes it: the layer is plain, and nobody asks for a gradient."""
    is_plain = type(module) is nn.Linear and module.bias is None and not torch.is_grad_enabled()
    return is_plain and has_gated_product(x, module.weight, activation)
