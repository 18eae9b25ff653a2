"""References: the policy that a KL term keeps the trained policy near.

- frozen: the weights that the run started from.
- ema: an exponential moving average, `ref <- (1-eta) ref + eta theta` after every optimizer step (T1, 2501.11651).
- hard_sync: a copy of the policy, renewed every N steps (R1, 2501.12948; ORZ, 2503.24290).
- teacher: another model, read from a directory (GKD, 2306.13649).
- teachers: several such models; each row has its own.
- policy: the policy at the start of the current step, which reads another context (`training/teacher_context.py`).
- iterate: the policy at the start of the current iteration of N steps. The trainer resets the optimizer there, so every iteration
  is an optimisation of its own (Kimi k1.5, 2501.12599).

A reference that moves is saved with a checkpoint. A frozen one is rebuilt from the run's start. Of a model with adapters only the
adapters are copied, or nothing if the adapter starts at zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from burnish.algorithms.batch_columns import TEACHER_IDS, TEACHER_PROMPT
from burnish.algorithms.terms.loss_terms import ema_update
from burnish.config.model import Model
from burnish.core.batch import Batch
from burnish.core.sharded_tensors import full_tensor
from burnish.models.decoder import Decoder, drop_features
from burnish.models.kernels.logprob import Distribution, Distributions, Divergence
from burnish.models.lora.adapters import (
    adapter_weights,
    adapters_disabled,
    swapped_adapter_weights,
    trained_tower_weights,
)
from burnish.models.policy import load_policy
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Content
from burnish.training.forward import MicroBatch, Packing, ReferenceStates, batch_outputs, token_positions
from burnish.training.parallel.ranks import SOLO, Ranks, parallelize_model
from burnish.training.pictures import reading_pictures
from burnish.training.sharded_checkpoint import distribute_like, load_tensors_into, tensor_contents
from burnish.training.teacher_context import in_teacher_context

NO_PATHS: Mapping[str, str | Reference | None] = MappingProxyType({})
REFERENCE_FILE = "reference"
"""Name of the checkpoint file, without its suffix."""


class Reference:
    """A frozen reference: the model's weights at construction. Subclasses that move override `after_update` or `after_step`.

    With several `ranks`, construct it from the unsharded model, before the model is sharded. The copy is sharded here.
    """

    moves = False
    """Whether the weights are ever written to."""
    restarts = False
    """Whether a change starts a new optimisation, with the optimizer's moments reset."""
    is_policy = False
    """Whether it is the policy itself before a step's first update."""
    top: int | None = None
    """Number of most likely tokens in the KL over the vocabulary; None means all."""
    divergence: Divergence | None = None
    """The divergence over the vocabulary to compute in place of that KL."""

    def __init__(self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO) -> None:
        self.weights = snapshot_weights(model, self.moves)
        self.token_budget, self.temperature, self.ranks = token_budget, temperature, ranks
        if self.weights.model is not model:
            parallelize_model(self.weights.model, ranks)
            self.weights.weights = dict(self.weights.model.named_parameters())

    @property
    def model(self) -> nn.Module:
        """The module that computes: a copy, or the policy's own module with other adapter weights."""
        return self.weights.model

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token the model wrote, under the reference; 0 elsewhere.

        With the column `teacher_prompt`, the reference reads these prompts; rows that are not taught have 0.
        """
        if TEACHER_PROMPT not in batch.ragged:
            return self._logprobs(batch)
        taught = in_teacher_context(batch)
        found = self._logprobs(taught.batch)
        found = torch.cat([found, found.new_zeros(1)])[taught.position]  # position -1 is the added 0
        return torch.where(batch.action_mask, found, torch.zeros_like(found))

    def _logprobs(self, batch: Batch) -> Tensor:
        packing = Packing.of(self.model, self.token_budget)
        with self._weights() as model:
            return batch_outputs(model, batch, frozenset(), packing, self.temperature, ranks=self.ranks)["logp"]

    def distribution(self, micro_batch: MicroBatch) -> ReferenceStates:
        """The reference's distributions at the wanted tokens of a micro-batch, for a KL over the whole vocabulary.

        With the column `teacher_prompt`, those behind the teacher's prompts.
        """
        batch, wanted, shared_prefix = micro_batch.batch, micro_batch.wanted, micro_batch.shared_prefix
        if TEACHER_PROMPT in batch.ragged:
            batch, position = in_teacher_context(batch)
            wanted, shared_prefix = position[wanted], None
        return self._distribution(batch, wanted, shared_prefix)

    def _distribution(self, batch: Batch, wanted: Tensor, shared_prefix: Tensor | None) -> Distribution | Distributions:
        with self._weights() as model, reading_pictures(model, batch):
            assert isinstance(model, Decoder), "the config refuses any other model"
            found = model.distribution(batch.tokens, batch.offsets, wanted, shared_prefix)
        return found._replace(top=self.top, divergence=self.divergence)

    def _weights(self) -> AbstractContextManager[nn.Module]:
        """Context with the module that has the reference's weights."""
        return self.weights.active()

    def after_update(self, model: nn.Module) -> None:
        """Call this after every optimizer step that was not skipped."""

    def after_step(self, model: nn.Module, step: int) -> bool:
        """Call this after every training step, counted from 1. Returns whether the reference has changed."""
        return False

    def contents(self, stage: TensorStaging) -> list[Content]:
        """Checkpoint files; none for a frozen reference."""
        return []

    def load(self, folder: Path) -> None:
        """Load a checkpoint into a reference that was made from the initial weights of the run."""


class EmaReference(Reference):
    """Moving average, in float32 at least: eta times an update is too small to be added in half precision."""

    moves = True

    def __init__(
        self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, eta: float = 0.01
    ) -> None:
        super().__init__(model, token_budget, temperature, ranks)
        self.eta = eta
        self.has_moved = False

    @cached_property
    def shadow(self) -> dict[str, Tensor]:
        """The average; the reference's own weights if their type is wide enough."""
        weights = self.weights.writable()
        return {name: w.data.to(torch.promote_types(w.dtype, torch.float32)) for name, w in weights.items()}

    def after_update(self, model: nn.Module) -> None:
        """ref <- (1-eta) ref + eta theta."""
        theta = dict(model.named_parameters())
        self.ranks.reshard(self.model)
        ema_update(self.shadow.values(), [theta[name] for name in self.shadow], self.eta)
        self.has_moved = True
        drop_features(self.model)

    @torch.no_grad()
    def _weights(self) -> AbstractContextManager[nn.Module]:
        """Context with the module that has the average, rounded to the model's type."""
        for name, weight in self.weights.writable().items() if self.has_moved else ():
            if self.shadow[name].dtype != weight.dtype:
                weight.copy_(self.shadow[name])
        self.has_moved = False
        return super()._weights()

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The average in its own precision."""
        return tensor_contents(REFERENCE_FILE, self.shadow, self.model, stage)

    def load(self, folder: Path) -> None:
        """Load the average."""
        load_tensors_into(folder, REFERENCE_FILE, self.shadow, self.model)
        self.has_moved = True


class HardSyncReference(Reference):
    """The policy after the last step that is a multiple of `every`; before that, the run's start."""

    moves = True

    def __init__(
        self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, every: int = 400
    ) -> None:
        super().__init__(model, token_budget, temperature, ranks)
        self.every = every

    @torch.no_grad()
    def after_step(self, model: nn.Module, step: int) -> bool:
        """Copy the policy if `every` divides the step."""
        if step % self.every:
            return False
        theta = dict(model.named_parameters())
        self.ranks.reshard(self.model)
        for name, weight in self.weights.writable().items():
            weight.copy_(theta[name])
        drop_features(self.model)
        return True

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The copied weights."""
        return tensor_contents(REFERENCE_FILE, self.weights.writable(), self.model, stage)

    def load(self, folder: Path) -> None:
        """Load the copied weights."""
        load_tensors_into(folder, REFERENCE_FILE, self.weights.writable(), self.model)


class IterateReference(HardSyncReference):
    """The policy at the start of the current iteration of `every` steps."""

    restarts = True

    def __init__(
        self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, every: int = 1
    ) -> None:
        super().__init__(model, token_budget, temperature, ranks, every)


class CurrentReference(Reference):
    """The policy itself, for iterations of one step: its log-probs are computed before the step's first update."""

    restarts = True
    is_policy = True

    def __init__(self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO) -> None:
        self.weights = ReferenceWeights(model)
        self.token_budget, self.temperature, self.ranks = token_budget, temperature, ranks

    def after_step(self, model: nn.Module, step: int) -> bool:
        """Every step starts an iteration."""
        return True


class PolicyReference(CurrentReference):
    """The policy itself, in another context; the optimizer is not reset. Over the vocabulary it is asked during the updates of a step."""

    restarts = False

    def after_step(self, model: nn.Module, step: int) -> bool:
        """The policy moves by itself."""
        return False


class TeacherReference(Reference):
    """A model from a directory, in the policy's type and on its device; without a path, the policy as it is now.

    A teacher's vocabulary may be padded further than the policy's. The KL over the vocabulary leaves the additional rows out.
    """

    num_rows: int | None = None
    """Rows of the policy's head; None unless the teacher's head has more rows."""

    def __init__(
        self, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, path: str | None = None
    ) -> None:
        if path is None:
            super().__init__(model, token_budget, temperature, ranks)
            return
        self.weights = ReferenceWeights(load_teacher(model, path))
        self.token_budget, self.temperature, self.ranks = token_budget, temperature, ranks
        parallelize_model(self.weights.model, ranks, policy=model)
        own, teachers = (m.head_weight.shape[0] if isinstance(m, Decoder) else 0 for m in (model, self.weights.model))
        self.num_rows = own if teachers > own else None

    def _distribution(self, batch: Batch, wanted: Tensor, shared_prefix: Tensor | None) -> Distribution | Distributions:
        """As for any reference, over the policy's vocabulary."""
        found = super()._distribution(batch, wanted, shared_prefix)
        assert isinstance(found, Distribution)
        return found if self.num_rows is None else found._replace(weight=found.weight[: self.num_rows])


class TeachersReference(Reference):
    """Several teachers. The column `teacher_ids` has the index of each row's teacher, in the order of `paths`.

    A path is a directory, None for the policy as it is now, or a reference that is there already, such as a server.
    """

    def __init__(
        self,
        model: nn.Module,
        token_budget: int,
        temperature: float,
        ranks: Ranks = SOLO,
        paths: Mapping[str, str | Reference | None] = NO_PATHS,
        column: str = "data_source",
    ) -> None:
        self.teachers = [
            path if isinstance(path, Reference) else TeacherReference(model, token_budget, temperature, ranks, path)
            for path in paths.values()
        ]
        assert self.teachers, "the config refuses an empty list"

    @property
    def model(self) -> nn.Module:
        raise AssertionError("each teacher has a model of its own")

    def _logprobs(self, batch: Batch) -> Tensor:
        """The log-probs of each row under its own teacher."""
        logp = torch.zeros(batch.num_tokens, device=batch.tokens.device)
        for index, rows in self._rows_by_teacher(batch):
            found = self.teachers[index]._logprobs(batch.select(rows))
            logp = logp.to(torch.promote_types(logp.dtype, found.dtype))
            logp[token_positions(batch, rows)] = found.to(logp.dtype)
        return logp

    def _distribution(self, batch: Batch, wanted: Tensor, shared_prefix: Tensor | None) -> Distribution | Distributions:
        """One distribution for the tokens of each teacher."""
        parts = []
        of_token = batch.sequence[TEACHER_IDS][batch.sequence_ids[wanted]]
        in_part = torch.empty(batch.num_tokens, dtype=torch.long, device=batch.tokens.device)
        for index, rows in self._rows_by_teacher(batch):
            part, where = batch.select(rows), token_positions(batch, rows)
            in_part[where] = torch.arange(where.numel(), device=where.device)
            own = (of_token == index).nonzero().squeeze(1)
            if not own.numel():
                continue
            teacher = self.teachers[index]
            teacher.top, teacher.divergence = self.top, self.divergence
            found = teacher._distribution(part, in_part[wanted[own]], None)
            assert isinstance(found, Distribution)
            parts.append((own, found))
        return Distributions(tuple(parts))

    @staticmethod
    def _rows_by_teacher(batch: Batch) -> list[tuple[int, Tensor]]:
        ids = batch.sequence[TEACHER_IDS]
        return [(int(index), (ids == index).nonzero().squeeze(1)) for index in ids.unique()]


def load_teacher(model: nn.Module, path: str) -> nn.Module:
    """A frozen model from a directory, in the type and on the device of `model`."""
    weight = next(model.parameters())
    is_deferred = weight.device.type == "meta"
    device = "cpu" if is_deferred else str(weight.device)
    config = Model.model_validate({"path": path, "dtype": str(weight.dtype).removeprefix("torch."), "device": device})
    return load_policy(config, Path(path), None, 0, may_defer=is_deferred).module.requires_grad_(False).eval()


REFERENCES: dict[str, type[Reference]] = {
    "frozen": Reference,
    "ema": EmaReference,
    "hard_sync": HardSyncReference,
    "iterate": IterateReference,
    "teacher": TeacherReference,
    "teachers": TeachersReference,
    "policy": PolicyReference,
}


def make_reference(
    name: str, model: nn.Module, token_budget: int, temperature: float, ranks: Ranks = SOLO, **options: Any
) -> Reference:
    """A reference of the named kind, made from the model's current weights; options are those of its class."""
    if name == "iterate" and options.get("every", 1) == 1:
        return CurrentReference(model, token_budget, temperature, ranks)
    return REFERENCES[name](model, token_budget, temperature, ranks, **options)


# --- Where a reference's weights are -----------------------------------------------------------------------------------
#
# If the whole model is trained, the reference is a copy of it. If only adapters are trained, the frozen weights serve both: the
# policy's own module is used with its adapter disabled, or with other adapter weights, which are restored bit for bit afterwards.


class ReferenceWeights:
    """The weights of a reference: here the policy itself. `active()` yields the module that uses them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights: dict[str, Tensor] = {}
        """The copied weights by name."""

    def writable(self) -> dict[str, Tensor]:
        """The copied weights by name, to be changed in place. Call it only after the model has been sharded over the ranks."""
        return self.weights

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The module with the reference's weights, for passes without gradient."""
        yield self.model


class FullCopy(ReferenceWeights):
    """A copy of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(copy.deepcopy(model).requires_grad_(False).eval())
        self.weights = dict(self.model.named_parameters())


class AdapterCopy(ReferenceWeights):
    """A copy of the adapter. It may be made before the model is sharded over ranks, and is sharded like the model at its first use."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._is_distributed = False
        self.weights = {name: parameter.detach().clone() for name, parameter in adapter_weights(model).items()}

    def writable(self) -> dict[str, Tensor]:
        if not self._is_distributed:
            self.weights, self._is_distributed = distribute_like(self.weights, self.model), True
        return self.weights

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The policy's module with the copied adapter weights."""
        with swapped_adapter_weights(self.model, self.writable()):
            yield self.model


class AdapterDisabled(ReferenceWeights):
    """The base model without its adapter; nothing is copied."""

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The policy's module with its adapter disabled."""
        with adapters_disabled(self.model):
            yield self.model


def snapshot_weights(model: nn.Module, moves: bool) -> ReferenceWeights:
    """The current weights of a model; writable if the reference `moves`."""
    adapter = adapter_weights(model)
    if not adapter:
        return FullCopy(model)
    is_new = not any(bool(full_tensor(p.any())) for name, p in adapter.items() if name.endswith(".lora_b"))
    if not moves and is_new and not trained_tower_weights(model):
        return AdapterDisabled(model)  # B = 0, so the new adapter changes nothing
    return AdapterCopy(model)
