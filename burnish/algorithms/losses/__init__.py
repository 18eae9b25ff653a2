"""Slot `loss`, and losses as records: what a learner differentiates, and what it must provide for that."""

from __future__ import annotations

from burnish.algorithms.losses.policy import Loss, NllLoss, PolicyLoss
from burnish.algorithms.losses.table import LOSSES

__all__ = ["LOSSES", "Loss", "NllLoss", "PolicyLoss"]
