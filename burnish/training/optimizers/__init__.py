"""Optimizers over named parameters, whole or cut over ranks, with their state where there is room for it."""

from burnish.training.optimizers.factory import make_optimizer
from burnish.training.optimizers.optimizer import BaseOptimizer

__all__ = ["BaseOptimizer", "make_optimizer"]
