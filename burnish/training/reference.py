"""The policy to stay near, in a KL term: weights that stand still, or follow the policy's in one of three ways.

- frozen: the weights the run started from.
- ema: an exponential moving average of the weights, `ref <- (1-eta) ref + eta theta` after every optimizer step (T1,
  2501.11651).
- hard_sync: a copy of the policy, made again every N steps (R1, 2501.12948; ORZ, 2503.24290).
- teacher: another model, read from a directory (GKD, 2306.13649).
- iterate: the policy at the start of the current iteration of N steps, each an optimisation of its own: the trainer
  also resets the optimizer there (Kimi k1.5, 2501.12599).

One that moves is saved with a checkpoint; a frozen one is made again from the run's start. Of a model with adapters only
these are copied, or none where the adapter starts as nothing (`training/reference.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.algorithms.terms.loss_terms import ema_update
from burnish.config.model import Model
from burnish.core.batch import Batch
from burnish.core.sharded_tensors import full_tensor
from burnish.models.decoder import Decoder
from burnish.models.kernels.logprob import Distribution
from burnish.models.lora.adapters import adapter_weights, adapters_disabled, swapped_adapter_weights
from burnish.models.policy import load_policy
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Content
from burnish.training.forward import MicroBatch, Packing, batch_outputs
from burnish.training.parallel.ranks import SOLO, Ranks, parallelize_model
from burnish.training.sharded_checkpoint import distribute_like, load_tensors_into, tensor_contents

# --- Weights other than the policy's that a reference holds, and the model that has them for a while.
#
# A copy of the whole model, where all of it is trained. Where only adapters are, the frozen weights serve both: the policy's
# own module is used with its adapter off, or with other content in it, which is put back bit for bit afterwards.


class ReferenceWeights:
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


class FullCopy(ReferenceWeights):
    """A copy of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(copy.deepcopy(model).requires_grad_(False).eval())
        self.weights = dict(self.model.named_parameters())


class AdapterCopy(ReferenceWeights):
    """A copy of the adapter. It may be made before the model is spread over processes, and is spread with it when it is used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._is_spread = False
        self.weights = {name: parameter.detach().clone() for name, parameter in adapter_weights(model).items()}

    def settled(self) -> dict[str, Tensor]:
        if not self._is_spread:
            self.weights, self._is_spread = distribute_like(self.weights, self.model), True
        return self.weights

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The policy's module with the copy's content."""
        with swapped_adapter_weights(self.model, self.settled()):
            yield self.model


class AdapterDisabled(ReferenceWeights):
    """The model below the adapter: nothing is copied."""

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The policy's module with its adapter off."""
        with adapters_disabled(self.model):
            yield self.model


def snapshot_weights(model: nn.Module, moves: bool) -> ReferenceWeights:
    """The weights a model has now; those of one that `moves` can be written to."""
    adapter = adapter_weights(model)
    if not adapter:
        return FullCopy(model)
    if not moves and not any(bool(full_tensor(p.any())) for name, p in adapter.items() if name.endswith(".lora_b")):
        return AdapterDisabled(model)  # a new adapter changes nothing
    return AdapterCopy(model)


REFERENCE_FILE = "reference"


class Reference:
    """The model as it was when this was made. Kinds that move say so in `after_update` or `after_step`.

    Of several `ranks` each makes this of the whole model, before that is divided among them; the copy is divided here.
    """

    moves = False
    """Whether the weights are ever written to."""
    restarts = False
    """Whether a change begins a new optimisation, without the moments of the old one."""
    is_policy = False
    """Whether it is the policy itself, as it is before a step's first update."""
    top: int | None = None
    """How many tokens a KL over the vocabulary tells apart; None is all."""

    def __init__(self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO) -> None:
        self.held = snapshot_weights(model, self.moves)
        self.token_budget, self.temperature, self.ranks = token_budget, temperature, ranks
        if self.held.model is not model:
            parallelize_model(self.held.model, ranks)
            self.held.weights = dict(self.held.model.named_parameters())

    @property
    def model(self) -> nn.Module:
        """The module that is asked: a copy, or the policy's own with other adapters in it."""
        return self.held.model

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token the model wrote, under the reference; 0 elsewhere."""
        packing = Packing.of(self.model, self.token_budget)
        with self._weights() as model:
            return batch_outputs(model, batch, frozenset(), packing, self.temperature, ranks=self.ranks)["logp"]

    def distribution(self, piece: MicroBatch) -> Distribution:
        """What the reference says at the wanted tokens of a micro-batch, for a KL over the whole vocabulary."""
        with self._weights() as model:
            assert isinstance(model, Decoder), "the config refuses another model"
            found = model.distribution(piece.batch.tokens, piece.batch.offsets, piece.wanted, piece.shared_prefix)
        return found._replace(top=self.top)

    def _weights(self) -> AbstractContextManager[nn.Module]:
        """The model with the reference's weights."""
        return self.held.active()

    def after_update(self, model: nn.Module) -> None:
        """To be called after every optimizer step that was made."""

    def after_step(self, model: nn.Module, step: int) -> bool:
        """To be called after every training step, counted from 1; whether the reference has changed."""
        return False

    def contents(self, stage: TensorStaging) -> list[Content]:
        """What a checkpoint must hold to load this again."""
        return []

    def load(self, folder: Path) -> None:
        """What a checkpoint has, into a reference made from the run's start."""


class EmaReference(Reference):
    """The average is kept in float32 at least: a hundredth of a step is far below what a half type can add."""

    moves = True

    def __init__(
        self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, eta: float = 0.01
    ) -> None:
        super().__init__(model, token_budget, temperature, ranks)
        self.eta = eta
        self.has_moved = False

    @cached_property
    def shadow(self) -> dict[str, Tensor]:
        """The average: the held weights themselves, where their type is wide enough."""
        held = self.held.settled()
        return {name: w.data.to(torch.promote_types(w.dtype, torch.float32)) for name, w in held.items()}

    def after_update(self, model: nn.Module) -> None:
        """ref <- (1-eta) ref + eta theta."""
        theta = dict(model.named_parameters())
        self.ranks.reshard(self.model)
        ema_update(self.shadow.values(), [theta[name] for name in self.shadow], self.eta)
        self.has_moved = True

    @torch.no_grad()
    def _weights(self) -> AbstractContextManager[nn.Module]:
        """The model with the average, rounded to the model's type."""
        for name, weight in self.held.settled().items() if self.has_moved else ():
            if self.shadow[name].dtype != weight.dtype:
                weight.copy_(self.shadow[name])
        self.has_moved = False
        return super()._weights()

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The average as it is kept."""
        return tensor_contents(REFERENCE_FILE, self.shadow, self.model, stage)

    def load(self, folder: Path) -> None:
        """The average back."""
        load_tensors_into(folder, REFERENCE_FILE, self.shadow, self.model)
        self.has_moved = True


class HardSyncReference(Reference):
    """The policy as it was after the last step that `every` divides; until then as the run started."""

    moves = True

    def __init__(
        self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, every: int = 400
    ) -> None:
        super().__init__(model, token_budget, temperature, ranks)
        self.every = every

    @torch.no_grad()
    def after_step(self, model: nn.Module, step: int) -> bool:
        """Copy the policy every `every` steps."""
        if step % self.every:
            return False
        theta = dict(model.named_parameters())
        self.ranks.reshard(self.model)
        for name, weight in self.held.settled().items():
            weight.copy_(theta[name])
        return True

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The copy."""
        return tensor_contents(REFERENCE_FILE, self.held.settled(), self.model, stage)

    def load(self, folder: Path) -> None:
        """The copy back."""
        load_tensors_into(folder, REFERENCE_FILE, self.held.settled(), self.model)


class IterateReference(HardSyncReference):
    """The policy at the start of the current iteration of `every` steps."""

    restarts = True

    def __init__(
        self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, every: int = 1
    ) -> None:
        super().__init__(model, token_budget, temperature, ranks, every)


class CurrentReference(Reference):
    """The policy itself, for iterations of one step: log-probs are asked for before the step's first update."""

    restarts = True
    is_policy = True

    def __init__(self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO) -> None:
        self.held = ReferenceWeights(model)
        self.token_budget, self.temperature, self.ranks = token_budget, temperature, ranks

    def after_step(self, model: nn.Module, step: int) -> bool:
        """Every step begins an iteration."""
        return True


class TeacherReference(Reference):
    """The model of a directory, in the policy's type and on its device; without one, the model as it is now.

    A teacher may have more rows for tokens that do not exist than the policy has: a KL over the vocabulary leaves them out.
    """

    num_rows: int | None = None
    """Tokens that the policy tells apart; None: as many as the teacher."""

    def __init__(
        self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, path: str | None = None
    ) -> None:
        if path is None:
            super().__init__(model, token_budget, temperature, ranks)
            return
        self.held = ReferenceWeights(load_teacher(model, path))
        self.token_budget, self.temperature, self.ranks = token_budget, temperature, ranks
        parallelize_model(self.held.model, ranks)
        own, teachers = (m.head_weight.shape[0] if isinstance(m, Decoder) else 0 for m in (model, self.held.model))
        self.num_rows = own if teachers > own else None

    def distribution(self, piece: MicroBatch) -> Distribution:
        """As of any reference, over the tokens the policy has."""
        found = super().distribution(piece)
        return found if self.num_rows is None else found._replace(weight=found.weight[: self.num_rows])


def load_teacher(model: nn.Module, path: str) -> nn.Module:
    """The model of a directory beside `model`, whose type and device it has; nothing of it is trained."""
    weight = next(model.parameters())
    config = Model.model_validate(
        {"path": path, "dtype": str(weight.dtype).removeprefix("torch."), "device": str(weight.device)}
    )
    return load_policy(config, Path(path), None, 0).module.requires_grad_(False).eval()


REFERENCES: dict[str, type[Reference]] = {
    "frozen": Reference,
    "ema": EmaReference,
    "hard_sync": HardSyncReference,
    "iterate": IterateReference,
    "teacher": TeacherReference,
}


def make_reference(
    name: str, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, **options: Any
) -> Reference:
    """The reference of a kind, made of the weights the model has now; options are those of its class."""
    if name == "iterate" and options.get("every", 1) == 1:
        return CurrentReference(model, token_budget, temperature, ranks)
    return REFERENCES[name](model, token_budget, temperature, ranks, **options)
