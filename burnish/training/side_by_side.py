"""Micro-batches of an update that are computed side by side on a CPU, one a thread (`core/hands.py`), and their gradients.

Each hand adds up the gradients of its own micro-batches, in their order, and the sums of all hands are added in theirs: the
gradient is the same each time, to the bit. What is in flight at once is one token budget, divided among the hands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from burnish.core.hands import Hands
from burnish.models.decoder import Decoder, Layer
from burnish.models.four_bits import num_quantised
from burnish.models.ops.norm import WIDE
from burnish.training.forward import Piece
from burnish.training.meter import Meter
from burnish.training.optimizers.base import Optimizer
from burnish.training.parallel.ranks import SOLO, Ranks

LEAST_TOKENS = 2048
"""Of the token budget that a hand gets: smaller micro-batches cost more calls than the cores wait for each other."""
MOST_PARAMETERS = 1 << 23
"""Above it operations are so large that all cores are busy, and each hand's own copy of the gradient is worth counting."""

Gradients = list[Tensor | None]
Result = TypeVar("Result")


def num_hands(model: nn.Module, token_budget: int, ranks: Ranks = SOLO) -> int:
    """How many micro-batches of a model are worth computing at once; 1 where it is not known to allow it."""
    size = sum(p.numel() for p in model.parameters()) + num_quantised(model)
    if ranks is not SOLO or size > MOST_PARAMETERS:
        return 1
    if any(p.device.type != "cpu" or p.dtype not in WIDE for p in model.parameters()) or not _is_ours(model):
        return 1
    return max(1, min(torch.get_num_threads(), token_budget // LEAST_TOKENS))


def _is_ours(model: nn.Module) -> bool:
    """Whether it is made of decoders whose forward passes share nothing that changes."""
    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    shares_nothing = all(d.exact is None and d.split is None and d.activations != "offload" for d in decoders)
    return bool(decoders) and shares_nothing and all(layer.body is None for layer in layers)


def differentiate(
    found: list[Piece],
    value_of: Callable[[Piece], tuple[Tensor, Result]],
    hands: Hands,
    token_budget: int,
    optimizer: Optimizer,
    meter: Meter,
) -> list[Result]:
    """Gradients of the values of micro-batches, side by side where there are hands; returns what comes with each value.

    No more than the token budget at once, unless one micro-batch is more than that. The first hand's clock stands for all.
    """
    number = min(hands.number, len(found))
    if number > 1:
        number = max(1, min(number, token_budget // max(piece.num_rows for piece in found)))
    parameters = list(optimizer.parameters.values())
    sums: list[Gradients] = [[None] * len(parameters) for _ in range(number)]

    def of_one(hand: int, piece: Piece) -> Result:
        with meter("forward") if hand == 0 else nullcontext():
            value, rest = value_of(piece)
        with meter("backward") if hand == 0 else nullcontext():
            if number > 1:
                sums[hand] = added(sums[hand], torch.autograd.grad(value, parameters, allow_unused=True))
            else:
                value.backward()
                optimizer.absorb()
        return rest

    rest = hands.map(of_one, found, number)
    if number > 1:
        total: Gradients = [parameter.grad for parameter in parameters]
        for one in sums:
            total = added(total, one)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
    return rest


@torch.no_grad()
def added(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> Gradients:
    """Sums entry by entry; an entry that only one has is that one's. Nothing is written to: one tensor may stand for two gradients."""
    pairs = list(zip(left, right, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    sums = iter(torch._foreach_add([a for a, _ in both], [b for _, b in both]) if both else ())
    return [next(sums) if a is not None and b is not None else a if b is None else b for a, b in pairs]
