"""The policy to stay near: a frozen copy of the weights the run started from."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from burnish.core.batch import Batch
from burnish.training.forward import batch_logprobs


class FrozenReference:
    """A copy of the model as it was when this was made."""

    def __init__(self, model: nn.Module, token_budget: int, temperature: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.token_budget, self.temperature = token_budget, temperature

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token the model wrote, under the reference; 0 elsewhere."""
        return batch_logprobs(self.model, batch, self.token_budget, self.temperature)  # type: ignore[arg-type]
