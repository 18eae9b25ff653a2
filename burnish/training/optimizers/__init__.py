"""Optimizers over named parameters, whole or cut over ranks, with their state where there is room for it."""

from burnish.training.optimizers.base_optimizer import BaseOptimizer
from burnish.training.optimizers.update_rules import make_optimizer

__all__ = ["BaseOptimizer", "make_optimizer"]
