"""AdamW and its schedule, for every learner: the policy, the critic, a supervised stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from burnish.config.slots.base import Record


class Optimizer(Record):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's denominator constant."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: float = Field(1.0, gt=0)
    """Global gradient norm limit."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after warm-up."""
    warmup: int = Field(0, ge=0)
    """Updates of linear warm-up."""
    final: float = Field(0.0, ge=0, le=1)
    """Where linear and cosine end, as a fraction of lr."""

    @model_validator(mode="after")
    def _decays(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} are decay rates: each from 0 up to, but not including, 1")
        if self.schedule == "constant" and self.final:
            raise ValueError("final has no effect on a constant schedule: set schedule to linear or cosine")
        return self
