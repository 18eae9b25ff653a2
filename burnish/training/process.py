"""An implicit process reward model: a language model with a learner of its own, beside its frozen start (PRIME, 2502.01456).

Both give log-probs at temperature 1: what the policy was sampled at is no business of theirs.
"""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from burnish.algorithms.losses import Loss
from burnish.config.optimizer import Optimizer
from burnish.core.batch import Batch
from burnish.models.lora import adapter_weights
from burnish.run.contents import Content
from burnish.run.staging import Stage
from burnish.training.learner import Learner, Update
from burnish.training.parallel.ranks import SOLO, Ranks
from burnish.training.reference import Reference
from burnish.training.shards import read_into, tensor_contents

FOLDER, WEIGHTS = "process", "model"
Model = TypeVar("Model", bound=nn.Module)


def twin_of(policy: Model) -> Model:
    """A copy to be trained by itself. Of a policy with adapters these alone are copied: the frozen weights below are the policy's own."""
    own = adapter_weights(policy)
    shared = {
        id(t): t for name, t in chain(policy.named_parameters(), policy.named_buffers()) if own and name not in own
    }
    return copy.deepcopy(policy, shared)


class ProcessModel:
    """Log-probs of a model in training and of its start, which is made again from the run's start and never saved."""

    def __init__(
        self,
        model: nn.Module,
        start: Reference,
        optimizer: Optimizer,
        total_updates: int,
        token_budget: int,
        share_prompts: bool = True,
        ranks: Ranks = SOLO,
    ) -> None:
        self.model, self.start = model, start
        self.learner = Learner(model, optimizer, total_updates, token_budget, share_prompts=share_prompts, ranks=ranks)

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token the policy wrote, under the weights in training; 0 elsewhere."""
        return self.learner.logprobs(batch)

    def prior(self, batch: Batch) -> Tensor:
        """[N] the same under the frozen start."""
        return self.start.logprobs(batch)

    def update(self, mini_batch: Batch, loss: Loss) -> Update:
        """One optimizer step; its column of log-probs is from before it."""
        return self.learner.update(mini_batch, loss)

    def contents(self, stage: Stage) -> list[Content]:
        """The weights that are trained and their optimizer state, to lie in `process/` of a checkpoint."""
        weights = tensor_contents(f"{FOLDER}/{WEIGHTS}", self.learner.names, self.model, stage)
        return [*weights, *self.learner.contents(stage, f"{FOLDER}/")]

    def load(self, folder: Path) -> None:
        """What a checkpoint has, back; tensors keep their addresses."""
        read_into(folder / FOLDER, WEIGHTS, self.learner.names, self.model)
        self.learner.load(folder / FOLDER)
