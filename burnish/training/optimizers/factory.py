"""The optimizer a configuration names, for the parameters of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from burnish.config.model import Optimizer
from burnish.config.model import Optimizer as Config
from burnish.training.optimizers.adam8bit import Adam8bit
from burnish.training.optimizers.adamw import AdamW, Muon
from burnish.training.optimizers.optimizer import BaseOptimizer, Reduce
from burnish.training.optimizers.settings import aliases, fused_matrices, settings_of


def make_optimizer(
    model: nn.Module, parameters: Mapping[str, Tensor], config: Config, reduce: Reduce | None = None
) -> BaseOptimizer:
    """An optimizer of those parameters of a model that are trained, under the model's names for them."""
    settings = settings_of(parameters, config, aliases(model))
    if config.name == "muon":
        return Muon(parameters, config, settings, reduce, fused=fused_matrices(model))
    return {"adamw": AdamW, "adam8bit": Adam8bit}[config.name](parameters, config, settings, reduce)


# --- Learning-rate schedules: the factor of the peak rate at each update.


def num_warmup(warmup: int | float, total: int) -> int:
    """Warm-up in updates: a number below 1 is a fraction of `total`."""
    return round(warmup * total) if warmup < 1 else int(warmup)


def described(optimizer: Optimizer, update: int, total: int) -> str:
    """What the learning rate is from an update on, for a run whose length or schedule has changed."""
    scale = factor(update, total, optimizer.schedule, optimizer.warmup, optimizer.final, optimizer.decay)
    return (
        f"learning rate of the next update: {optimizer.lr * scale:.3g}, that of update {update + 1} on the {optimizer.schedule} schedule of a "
        f"run of {total:,} updates with lr={optimizer.lr:g}"
    )


def factor(update: int, total: int, schedule: str, warmup: int | float, final: float, decay: float = 0.2) -> float:
    """Linear from 1/warmup to 1 over `warmup` updates, then constant, or down to `final` at the last of `total`.

    wsd (MiniCPM, 2404.06395) stays at the peak until the last `decay` of all updates, and falls linearly in those. A
    single update after warm-up is made at the peak.
    """
    warmup = num_warmup(warmup, total)
    if update < warmup:
        return (update + 1) / warmup
    if schedule == "wsd":
        falling = max(1, round(decay * total))
        return 1 + (final - 1) * min(1.0, max(0, update - (total - falling) + 1) / falling)
    progress = min(1.0, (update - warmup) / max(1, total - warmup - 1))
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1 + (final - 1) * progress
    if schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}")
