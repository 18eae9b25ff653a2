"""Slot `loss`: imitation."""

from __future__ import annotations

from torch import Tensor

from burnish.algorithms.losses.sequences import logp_of
from burnish.algorithms.view import View


def nll(view: View, anchor: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -logp: negative log-likelihood of every token in the loss, whatever its reward."""
    loss = -logp_of(view)
    return loss, {"nll": loss.detach()}
