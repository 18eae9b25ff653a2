"""The critic: a value model with a learner of its own."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from burnish.algorithms.losses.value import ValueLoss
from burnish.config.optimizer import Optimizer
from burnish.core.batch import Batch
from burnish.models.value import ValueModel
from burnish.run.contents import Content
from burnish.run.staging import Stage
from burnish.training.learner import Learner, Update
from burnish.training.parallel.ranks import SOLO, Ranks
from burnish.training.shards import read_into, tensor_contents

FOLDER, WEIGHTS = "critic", "model"


class Critic:
    """Values of tokens, and one optimizer step at a time towards their returns."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: Optimizer,
        total_updates: int,
        token_budget: int,
        clip: float | None = 0.5,
        share_prompts: bool = True,
        ranks: Ranks = SOLO,
    ) -> None:
        self.model, self.loss = model, ValueLoss(clip)
        self.learner = Learner(model, optimizer, total_updates, token_budget, share_prompts=share_prompts, ranks=ranks)

    def values(self, batch: Batch) -> Tensor:
        """[N] the value of the state before each token the model wrote; 0 elsewhere."""
        return self.learner.outputs(batch, frozenset({"value"}))["value"]

    def update(self, mini_batch: Batch) -> Update:
        """One step on the token columns `returns`, `values` (from before the batch's first update) and `weight`."""
        return self.learner.update(mini_batch, self.loss, columns=False)

    def contents(self, stage: Stage) -> list[Content]:
        """The weights that are trained and their optimizer state, to lie in `critic/` of a checkpoint."""
        weights = tensor_contents(f"{FOLDER}/{WEIGHTS}", self.learner.names, self.model, stage)
        return [*weights, *self.learner.contents(stage, f"{FOLDER}/")]

    def load(self, folder: Path) -> None:
        """What a checkpoint has, back; tensors keep their addresses."""
        read_into(folder / FOLDER, WEIGHTS, self.learner.names, self.model)
        self.learner.load(folder / FOLDER)
