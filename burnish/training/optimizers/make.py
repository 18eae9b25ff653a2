"""The optimizer a configuration names, for the parameters of a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from burnish.config.optimizer import Optimizer as Config
from burnish.training.optimizers.adam8bit import Adam8bit
from burnish.training.optimizers.adamw import AdamW
from burnish.training.optimizers.base import Optimizer, Reduce
from burnish.training.optimizers.groups import settings_of
from burnish.training.optimizers.layout import aliases, fused_matrices
from burnish.training.optimizers.muon import Muon


def make_optimizer(
    model: nn.Module, parameters: Mapping[str, Tensor], config: Config, reduce: Reduce | None = None
) -> Optimizer:
    """An optimizer of those parameters of a model that are trained, under the model's names for them."""
    settings = settings_of(parameters, config, aliases(model))
    if config.name == "muon":
        return Muon(parameters, config, settings, reduce, fused=fused_matrices(model))
    return {"adamw": AdamW, "adam8bit": Adam8bit}[config.name](parameters, config, settings, reduce)
