"""Weights other than the policy's that a reference holds, and the model that has them for a while.

A copy of the whole model, where all of it is trained. Where only adapters are, the frozen weights serve both: the policy's
own module is used with its adapter off, or with other content in it, which is put back bit for bit afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from burnish.core.local import gathered
from burnish.models.lora import adapter_off, adapter_weights, holding
from burnish.training.shards import spread_like


class Held:
    """The policy itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights: dict[str, Tensor] = {}
        """What is held by name."""

    def settled(self) -> dict[str, Tensor]:
        """What is held by name, to be written to in place: for the first time when the model is where it shall be."""
        return self.weights

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The model with the held weights, for passes without gradient."""
        yield self.model


class HeldCopy(Held):
    """A copy of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(copy.deepcopy(model).requires_grad_(False).eval())
        self.weights = dict(self.model.named_parameters())


class HeldAdapter(Held):
    """A copy of the adapter. It may be made before the model is spread over processes, and is spread with it when it is used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._is_spread = False
        self.weights = {name: parameter.detach().clone() for name, parameter in adapter_weights(model).items()}

    def settled(self) -> dict[str, Tensor]:
        if not self._is_spread:
            self.weights, self._is_spread = spread_like(self.weights, self.model), True
        return self.weights

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The policy's module with the copy's content."""
        with holding(self.model, self.settled()):
            yield self.model


class HeldOff(Held):
    """The model below the adapter: nothing is copied."""

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The policy's module with its adapter off."""
        with adapter_off(self.model):
            yield self.model


def hold(model: nn.Module, moves: bool) -> Held:
    """The weights a model has now; those of one that `moves` can be written to."""
    adapter = adapter_weights(model)
    if not adapter:
        return HeldCopy(model)
    if not moves and not any(bool(gathered(p.any())) for name, p in adapter.items() if name.endswith(".lora_b")):
        return HeldOff(model)  # a new adapter changes nothing
    return HeldAdapter(model)
