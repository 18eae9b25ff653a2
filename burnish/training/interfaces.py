"""Interfaces between a trainer and its learner, reference, critic and process reward model.

`Learner`, `Reference`, `Critic` and `ProcessRewardModel` implement them in the trainer's process, and document the methods.
`distributed/role_proxies.py` implements them for other processes.
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
    """Interface of `Meter`."""

    def read(self) -> MeterReading:
        """The work since the last reading."""


class AnyLearner(Protocol):
    """Interface of `Learner`: log-probs and optimizer steps of a model."""

    updates: int

    @property
    def device(self) -> torch.device:
        """The device that batches must be on."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def model(self) -> Any:
        """The model that `Reference.after_update` and `after_step` take."""

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
    """Interface of `Reference`: the policy of a KL term."""

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
    """Interface of `Critic`: a value model."""

    @property
    def learner(self) -> AnyLearner: ...

    def values(self, batch: Batch) -> Tensor: ...

    def update(self, mini_batch: Batch) -> Update: ...

    def contents(self, stage: TensorStaging) -> list[Content]: ...

    def load(self, folder: Path) -> None: ...


class AnyProcessRewardModel(Protocol):
    """Interface of `ProcessRewardModel`."""

    @property
    def learner(self) -> AnyLearner: ...

    def logprobs(self, batch: Batch) -> Tensor: ...

    def prior(self, batch: Batch) -> Tensor: ...

    def update(self, mini_batch: Batch, loss: Loss) -> Update: ...

    def contents(self, stage: TensorStaging) -> list[Content]: ...

    def load(self, folder: Path) -> None: ...
