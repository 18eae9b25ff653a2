"""The gradient's norm block by block: where in the model the signal is, and where it vanishes or explodes."""

from __future__ import annotations

import re

import torch

from burnish.training.optimizers.base import Optimizer
from burnish.training.optimizers.shards import pieces

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def block_of(name: str) -> str:
    """The block of a parameter: embedding, layer_<k>, head, or rest (the final norm)."""
    if found := LAYER.search(name):
        return f"layer_{int(found[1]):02d}"
    words = name.split(".")
    if any("emb" in word or word == "wte" for word in words):
        return "embedding"
    return "head" if any("head" in word for word in words) else "rest"


@torch.no_grad()
def block_norms(optimizer: Optimizer) -> dict[str, float]:
    """The norm of each block's gradients, as `grad_norm_<block>`; their squares add up to the square of the whole norm.

    To be called on every rank alike: each has a piece of a parameter, and the norm is that of all of them.
    """
    gradients = optimizer.gradients()
    blocks = sorted({block_of(name) for name in optimizer.parameters})
    if not gradients or not blocks:
        return {}
    first = next(iter(gradients.values()))
    squares = torch.zeros(len(blocks), dtype=torch.float64, device=first.device)
    of_each = torch.stack([norm.double() for norm in torch._foreach_norm(list(gradients.values()))]).square()
    # A rank's piece stands for as many as there are: the mean over ranks is then the sum over pieces.
    of_each *= torch.tensor([pieces(optimizer.parameters[name]) for name in gradients], device=first.device)
    squares.index_add_(
        0, torch.tensor([blocks.index(block_of(name)) for name in gradients], device=first.device), of_each
    )
    if optimizer.reduce is not None:
        squares = optimizer.reduce(squares)
    return {f"grad_norm_{block}": norm for block, norm in zip(blocks, squares.sqrt().tolist(), strict=True)}
