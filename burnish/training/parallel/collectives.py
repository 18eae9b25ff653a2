"""Collectives on the rows of a tensor, under the names that the installed torch has for them.

torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor, and warns of the former names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """[n, ...] of every rank to [ranks * n, ...], in the order of the ranks."""
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    _collective("all_gather_single", "all_gather_into_tensor")(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks * n, ...] of every rank to [n, ...]: the sum over ranks of this rank's rows."""
    own = x.new_empty(len(x) // group.size(), *x.shape[1:])
    _collective("reduce_scatter_single", "reduce_scatter_tensor")(own, x.contiguous(), group=group)
    return own


@cache
def _collective(name: str, former_name: str) -> Callable[..., object]:
    from torch import distributed

    return cast("Callable[..., object]", getattr(distributed, name, None) or getattr(distributed, former_name))
