"""The table of algorithms: a row is one choice per slot, under a name."""

from __future__ import annotations

from typing import Any

from burnish.algorithms.presets.critics_and_other_losses import BEYOND, WITH_CRITIC
from burnish.algorithms.presets.group_baselines import CRITIC_FREE, Preset
from burnish.config.errors import unknown

__all__ = ["PRESETS", "Preset", "preset"]

PRESETS: dict[str, Preset] = {**CRITIC_FREE, **WITH_CRITIC, **BEYOND}


def preset(name: str) -> dict[str, Any]:
    """A preset's slots as a plain dictionary; the error for an unknown name lists the table."""
    if name not in PRESETS:
        raise unknown("algorithm", name, PRESETS)
    return {"preset": name, **PRESETS[name].slots}
