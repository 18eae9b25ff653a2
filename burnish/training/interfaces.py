"""What a trainer asks of a learner, a reference, a critic and a process reward model, wherever they are.

`Learner`, `Reference`, `Critic` and `ProcessModel` are these in the trainer's own process; `distributed/role_proxies.py` has those whose work is
done by other processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.algorithms.losses.policy_loss import Loss
from burnish.core.batch import Batch
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Content
from burnish.training.forward import Needs
from burnish.training.learner import Update
from burnish.training.meter import MeterReading


class AnyMeter(Protocol):
    """What knows how long the learner's work took."""

    def read(self) -> MeterReading:
        """All since the last reading."""


class AnyLearner(Protocol):
    """Log-probs and optimizer steps of a model; `Learner` says what each method means."""

    updates: int

    @property
    def device(self) -> torch.device:
        """Where batches are to be when they are handed in."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def model(self) -> Any:
        """What a reference of the same place follows."""

    @property
    def meter(self) -> AnyMeter: ...

    def logprobs(self, batch: Batch) -> Tensor: ...

    def outputs(self, batch: Batch, needs: Needs, mask: str = "action_mask") -> dict[str, Tensor]: ...

    def update(
        self,
        batch: Batch,
        loss: Loss,
        lr_scale: float = 1.0,
        also: tuple[Batch, Loss] | None = None,
        columns: bool = True,
    ) -> Update: ...

    def release(self) -> None: ...

    def reset_optimizer(self) -> None: ...

    def usage(self) -> dict[str, float]: ...

    def contents(self, stage: TensorStaging, folder: str = "") -> list[Content]: ...

    def load(self, directory: Path) -> None: ...


class AnyReference(Protocol):
    """The policy to stay near; `Reference` says what each method means."""

    @property
    def restarts(self) -> bool: ...

    @property
    def is_policy(self) -> bool: ...

    def logprobs(self, batch: Batch) -> Tensor: ...

    def after_update(self, model: Any) -> None: ...

    def after_step(self, model: Any, step: int) -> bool: ...

    def contents(self, stage: TensorStaging) -> list[Content]: ...

    def load(self, folder: Path) -> None: ...


class AnyCritic(Protocol):
    """Values of tokens, learned; `Critic` says what each method means."""

    @property
    def learner(self) -> AnyLearner: ...

    def values(self, batch: Batch) -> Tensor: ...

    def update(self, mini_batch: Batch) -> Update: ...

    def contents(self, stage: TensorStaging) -> list[Content]: ...

    def load(self, folder: Path) -> None: ...


class AnyProcessRewardModel(Protocol):
    """A language model and its frozen start, for process rewards; `ProcessModel` says what each method means."""

    @property
    def learner(self) -> AnyLearner: ...

    def logprobs(self, batch: Batch) -> Tensor: ...

    def prior(self, batch: Batch) -> Tensor: ...

    def update(self, mini_batch: Batch, loss: Loss) -> Update: ...

    def contents(self, stage: TensorStaging) -> list[Content]: ...

    def load(self, folder: Path) -> None: ...
