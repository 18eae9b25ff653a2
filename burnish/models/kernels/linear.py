"""A matrix product of few rows, as partial sums over its inputs: enough pieces to keep a whole GPU busy.

Decoding multiplies a few hundred rows by a wide matrix. With few outputs that makes a couple of dozen tiles for over a
hundred processors; cut over the inputs it makes several times as many, whose sums are added by whoever reads them next
(`ops/paged.py: add_norm`). On an H200 a product of 256 rows, 8960 inputs and 1536 outputs takes 13 instead of 18.5
microseconds. Each part is rounded to the model's type: as many errors as parts, each smaller by the root of their number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from burnish.models.kernels.cuda.hopper import gated_product, has_gated_product
from burnish.models.kernels.device import use_kernels

TILE = 128
PROCESSORS = 132
"""Of an H100 or H200; another GPU's count would move the choice a little."""
LEAST_INPUTS = {2: 1536, 4: 8192}
"""Inputs from which on so many parts pay."""


def num_parts(rows: int, inputs: int, outputs: int) -> int:
    """How many parts a product is best cut into."""
    tiles = -(-rows // TILE) * -(-outputs // TILE)
    fitting = [p for p, least in LEAST_INPUTS.items() if inputs >= least and inputs % (p * 64) == 0]
    return max((p for p in fitting if tiles * p <= PROCESSORS), default=1)


def partial_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """The layer on rows [N, in]: [N, out], or parts [P, N, out] that add up to it where that is faster."""
    outputs, inputs = module.out_features, module.in_features
    parts = (
        num_parts(x.shape[0], inputs, outputs) if use_kernels(x) and x.dtype in (torch.bfloat16, torch.float16) else 1
    )
    if parts == 1 or type(module) is not nn.Linear or module.bias is not None:
        return module(x)
    return partial_products(x, module.weight, parts)


def partial_products(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """[parts, N, out]: part p is the product over the p-th stretch of the inputs; no copy of either is made."""
    rows = x.view(x.shape[0], parts, -1).transpose(0, 1)
    columns = weight.view(weight.shape[0], parts, -1).permute(1, 2, 0)
    return torch.bmm(rows, columns)


# --- The gated half of an MLP without gradient: in one kernel where there is one, else a product and an activation.


def gated_linear(module: nn.Linear, x: Tensor, activation: str, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """`activate`, which is called `activation`, of a gate-and-up layer on rows [N, in]: [N, out]."""
    if has_one_kernel(module, x, activation):
        return gated_product(x, module.weight, activation)
    return activate(module(x))


def has_one_kernel(module: nn.Linear, x: Tensor, activation: str) -> bool:
    """Whether one kernel makes it: the layer is plain, and nobody asks for a gradient."""
    is_plain = type(module) is nn.Linear and module.bias is None and not torch.is_grad_enabled()
    return is_plain and has_gated_product(x, module.weight, activation)
