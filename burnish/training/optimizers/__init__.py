"""Optimizers over named parameters, whole or sharded over ranks, with state on the device or in host memory."""

from burnish.training.optimizers.base_optimizer import BaseOptimizer
from burnish.training.optimizers.update_rules import make_optimizer

__all__ = ["BaseOptimizer", "make_optimizer"]
