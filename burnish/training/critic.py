"""The critic: a value model with a learner of its own."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from burnish.algorithms.losses.value import ValueLoss
from burnish.config.optimizer import Optimizer
from burnish.core.batch import Batch
from burnish.models.value import ValueModel
from burnish.training.learner import Learner, Update
from burnish.training.tensors import read_into, write_tensors

FOLDER, WEIGHTS = "critic", "model.safetensors"


class Critic:
    """Values of tokens, and one optimizer step at a time towards their returns."""

    def __init__(
        self, model: ValueModel, optimizer: Optimizer, total_updates: int, token_budget: int, clip: float | None = 0.5
    ) -> None:
        self.model, self.loss = model, ValueLoss(clip)
        self.learner = Learner(model, optimizer, total_updates, token_budget)

    def values(self, batch: Batch) -> Tensor:
        """[N] the value of the state before each token the model wrote; 0 elsewhere."""
        return self.learner.outputs(batch, frozenset({"value"}))["value"]

    def update(self, mini_batch: Batch) -> Update:
        """One step on the token columns `returns`, `values` (from before the batch's first update) and `weight`."""
        return self.learner.update(mini_batch, self.loss)

    def save(self, folder: Path) -> None:
        """Weights and optimizer state into `critic/` of a checkpoint."""
        (folder / FOLDER).mkdir()
        write_tensors(folder / FOLDER / WEIGHTS, dict(self.model.named_parameters()))
        self.learner.save(folder / FOLDER)

    def load(self, folder: Path) -> None:
        """The inverse of `save`; tensors keep their addresses."""
        read_into(folder / FOLDER / WEIGHTS, dict(self.model.named_parameters()))
        self.learner.load(folder / FOLDER)
