"""Optimizers over named parameters, whole or cut over ranks, with their state where there is room for it."""

from burnish.training.optimizers.base import Optimizer
from burnish.training.optimizers.make import make_optimizer

__all__ = ["Optimizer", "make_optimizer"]
