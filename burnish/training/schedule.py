"""Learning-rate schedules: the factor of the peak rate at each update."""

from __future__ import annotations

import math


def factor(update: int, total: int, schedule: str, warmup: int, final: float) -> float:
    """Linear from 1/warmup to 1 over `warmup` updates, then constant, or down to `final` at the last of `total`.

    A single update after warm-up is made at the peak.
    """
    if update < warmup:
        return (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, total - warmup - 1))
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1 + (final - 1) * progress
    if schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}")
