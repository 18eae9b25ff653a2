"""The policy to stay near, in a KL term: a copy of the model that stands still, or follows it in one of three ways.

- frozen: the weights the run started from.
- ema: an exponential moving average of the weights, `ref <- (1-eta) ref + eta theta` after every optimizer step (T1,
  2501.11651).
- hard_sync: a copy of the policy, made again every N steps (R1, 2501.12948; ORZ, 2503.24290).
- iterate: the policy at the start of the current iteration of N steps, each an optimisation of its own: the trainer
  also resets the optimizer there (Kimi k1.5, 2501.12599).

One that moves is saved with a checkpoint; a frozen one is made again from the run's start.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.algorithms.kl import ema_update
from burnish.core.batch import Batch
from burnish.training.forward import batch_outputs
from burnish.training.tensors import read_into, write_tensors

FILE = "reference.safetensors"


class Reference:
    """A copy of the model as it was when this was made. Kinds that move say so in `after_update` or `after_step`."""

    restarts = False
    """Whether a change begins a new optimisation, without the moments of the old one."""
    is_policy = False
    """Whether it is the policy itself, as it is before a step's first update."""

    def __init__(self, model: nn.Module, token_budget: int, temperature: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.token_budget, self.temperature = token_budget, temperature

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token the model wrote, under the reference; 0 elsewhere."""
        return batch_outputs(self.model, batch, frozenset(), self.token_budget, self.temperature)["logp"]

    def after_update(self, model: nn.Module) -> None:
        """To be called after every optimizer step that was made."""

    def after_step(self, model: nn.Module, step: int) -> bool:
        """To be called after every training step, counted from 1; whether the reference has changed."""
        return False

    def save(self, folder: Path) -> None:
        """What a checkpoint must hold to load this again."""

    def load(self, folder: Path) -> None:
        """The inverse of `save`, on a reference made from the run's start."""


class EmaReference(Reference):
    """The average is kept in float32 at least: a hundredth of a step is far below what a half type can add."""

    def __init__(self, model: nn.Module, token_budget: int, temperature: float, eta: float = 0.01) -> None:
        super().__init__(model, token_budget, temperature)
        self.eta = eta
        self.shadow = {  # the parameters of the copy themselves, where their type is wide enough
            name: p.data.to(torch.promote_types(p.dtype, torch.float32)) for name, p in self.model.named_parameters()
        }

    def after_update(self, model: nn.Module) -> None:
        """ref <- (1-eta) ref + eta theta."""
        theta = dict(model.named_parameters())
        ema_update(self.shadow.values(), [theta[name] for name in self.shadow], self.eta)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-probs under the average, rounded to the model's type."""
        for name, parameter in self.model.named_parameters():
            if self.shadow[name].dtype != parameter.dtype:
                parameter.copy_(self.shadow[name])
        return super().logprobs(batch)

    def save(self, folder: Path) -> None:
        """The average as it is kept."""
        write_tensors(folder / FILE, self.shadow)

    def load(self, folder: Path) -> None:
        """The inverse of `save`."""
        read_into(folder / FILE, self.shadow)


class HardSyncReference(Reference):
    """The policy as it was after the last step that `every` divides; until then as the run started."""

    def __init__(self, model: nn.Module, token_budget: int, temperature: float, every: int = 400) -> None:
        super().__init__(model, token_budget, temperature)
        self.every = every

    @torch.no_grad()
    def after_step(self, model: nn.Module, step: int) -> bool:
        """Copy the policy every `every` steps."""
        if step % self.every:
            return False
        theta = dict(model.named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(theta[name])
        return True

    def save(self, folder: Path) -> None:
        """The copy."""
        write_tensors(folder / FILE, dict(self.model.named_parameters()))

    def load(self, folder: Path) -> None:
        """The inverse of `save`."""
        read_into(folder / FILE, dict(self.model.named_parameters()))


class IterateReference(HardSyncReference):
    """The policy at the start of the current iteration of `every` steps."""

    restarts = True

    def __init__(self, model: nn.Module, token_budget: int, temperature: float, every: int = 1) -> None:
        super().__init__(model, token_budget, temperature, every)


class CurrentReference(Reference):
    """The policy itself, for iterations of one step: log-probs are asked for before the step's first update."""

    restarts = True
    is_policy = True

    def __init__(self, model: nn.Module, token_budget: int, temperature: float) -> None:
        self.model, self.token_budget, self.temperature = model, token_budget, temperature

    def after_step(self, model: nn.Module, step: int) -> bool:
        """Every step begins an iteration."""
        return True


REFERENCES: dict[str, type[Reference]] = {
    "frozen": Reference,
    "ema": EmaReference,
    "hard_sync": HardSyncReference,
    "iterate": IterateReference,
}


def make_reference(name: str, model: nn.Module, token_budget: int, temperature: float, **options: Any) -> Reference:
    """The reference of a kind, made of the weights the model has now; options are those of its class."""
    if name == "iterate" and options.get("every", 1) == 1:
        return CurrentReference(model, token_budget, temperature)
    return REFERENCES[name](model, token_budget, temperature, **options)
