"""The critic: a copy of the policy's backbone with a scalar head, and how it is trained."""

from __future__ import annotations

from pydantic import Field

from burnish.config.optimizer import Optimizer
from burnish.config.slots.base import Record


class Critic(Record):
    """A learned value of every token: a copy of the policy's backbone with a scalar head."""

    warmup_steps: int = Field(0, ge=0)
    """First steps that train the critic alone, on Monte-Carlo returns (value pre-training of VC-PPO and VAPO)."""
    updates: int = Field(1, ge=1)
    """Critic steps for each mini-batch, before the policy's."""
    clip: float | None = Field(0.5, gt=0)
    """A value may move this far from the one the batch was prepared with before its loss is clipped; null is off."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    """The optimizer and its schedule."""
