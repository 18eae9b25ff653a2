"""Models trained beside the policy, each with its own learner: the critic and the implicit process reward model."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from burnish.algorithms.losses.model_losses import ValueLoss
from burnish.algorithms.losses.policy_loss import Loss
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.models.heads import ValueModel
from burnish.models.lora.adapters import adapter_weights
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Content
from burnish.training.learner import Learner, Update
from burnish.training.parallel.ranks import SOLO, Ranks
from burnish.training.reference import Reference
from burnish.training.sharded_checkpoint import load_tensors_into, tensor_contents

CRITIC_FOLDER, PROCESS_FOLDER = "critic", "process"
"""Folders of a checkpoint."""
WEIGHTS_FILE = "model"
Model = TypeVar("Model", bound=nn.Module)


class Critic:
    """A value model: values of tokens, and optimizer steps towards their returns."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: Optimizer,
        total_updates: int,
        token_budget: int,
        clip: float | None = 0.5,
        share_prefixes: bool = True,
        ranks: Ranks = SOLO,
    ) -> None:
        self.model, self.loss = model, ValueLoss(clip)
        self.learner = Learner(
            model, optimizer, total_updates, token_budget, share_prefixes=share_prefixes, ranks=ranks
        )

    def values(self, batch: Batch) -> Tensor:
        """[N] value of the state before each token that the model wrote; 0 elsewhere."""
        return self.learner.outputs(batch, frozenset({"value"}))["value"]

    def update(self, mini_batch: Batch) -> Update:
        """One optimizer step on the token columns `returns`, `values` (before the batch's first update) and `weight`."""
        return self.learner.update(mini_batch, self.loss, columns=False)

    def contents(self, stage: TensorStaging) -> list[Content]:
        """Trained weights and optimizer state, as files in `critic/` of a checkpoint."""
        return _learner_contents(self.learner, CRITIC_FOLDER, stage)

    def load(self, folder: Path) -> None:
        """Load a checkpoint in place."""
        _load_learner(self.learner, folder / CRITIC_FOLDER)


class ProcessRewardModel:
    """Implicit process reward model: log-probs of a language model in training and of its frozen start (PRIME, 2502.01456).

    Both are computed at temperature 1, whatever the policy was sampled at. The start is rebuilt from the run's start, and never saved.
    """

    def __init__(
        self,
        model: nn.Module,
        start: Reference,
        optimizer: Optimizer,
        total_updates: int,
        token_budget: int,
        share_prefixes: bool = True,
        ranks: Ranks = SOLO,
    ) -> None:
        self.model, self.start = model, start
        self.learner = Learner(
            model, optimizer, total_updates, token_budget, share_prefixes=share_prefixes, ranks=ranks
        )

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token that the policy wrote, under the trained weights; 0 elsewhere."""
        return self.learner.logprobs(batch)

    def prior(self, batch: Batch) -> Tensor:
        """[N] log-probs under the frozen start."""
        return self.start.logprobs(batch)

    def update(self, mini_batch: Batch, loss: Loss) -> Update:
        """One optimizer step. Its column of log-probs is from before the step."""
        return self.learner.update(mini_batch, loss)

    def contents(self, stage: TensorStaging) -> list[Content]:
        """Trained weights and optimizer state, as files in `process/` of a checkpoint."""
        return _learner_contents(self.learner, PROCESS_FOLDER, stage)

    def load(self, folder: Path) -> None:
        """Load a checkpoint in place."""
        _load_learner(self.learner, folder / PROCESS_FOLDER)


def trainable_copy(policy: Model) -> Model:
    """A copy that can be trained separately. With LoRA only the adapters are copied, and the frozen weights are shared."""
    own = adapter_weights(policy)
    shared = {
        id(t): t for name, t in chain(policy.named_parameters(), policy.named_buffers()) if own and name not in own
    }
    return copy.deepcopy(policy, shared)


def _learner_contents(learner: Learner, folder: str, stage: TensorStaging) -> list[Content]:
    weights = tensor_contents(f"{folder}/{WEIGHTS_FILE}", learner.names, learner.model, stage)
    return [*weights, *learner.contents(stage, f"{folder}/")]


def _load_learner(learner: Learner, folder: Path) -> None:
    load_tensors_into(folder, WEIGHTS_FILE, learner.names, learner.model)
    learner.load(folder)
