"""Whole parameters out of a model that is cut over ranks, for engines and exports."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn

from burnish.core.local import gathered
from burnish.models.decoder import Decoder
from burnish.models.row_order import order_of, usual
from burnish.training.parallel.shard import settle, trunk_of


@torch.no_grad()
def full_parameters(model: nn.Module, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, or those of some names, whole and with its rows in the usual order, one at a time; all ranks must go
    through it.

    Tensors of a model that is not cut are its own; others are new, and are freed when the next is asked for.
    """
    settle(model)
    trunk = trunk_of(model)
    wanted = [(name, parameter) for name, parameter in model.named_parameters() if names is None or name in names]
    for name, parameter in wanted:
        whole = gathered(parameter)
        yield name, usual(whole, order_of(trunk, name)) if isinstance(trunk, Decoder) else whole
