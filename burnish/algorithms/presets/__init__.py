"""The table of algorithms: a row is one choice per slot, under a name."""

from __future__ import annotations

from typing import Any

from burnish.algorithms.presets.agents import AGENTS
from burnish.algorithms.presets.critic_and_other_objectives import OTHER_OBJECTIVES, WITH_CRITIC
from burnish.algorithms.presets.critic_free import CRITIC_FREE, Preset
from burnish.algorithms.presets.distillation import DISTILLATION
from burnish.algorithms.presets.off_policy import OFF_POLICY
from burnish.config.errors import unknown_name_error

__all__ = ["PRESETS", "Preset", "preset_slots"]

PRESETS: dict[str, Preset] = {
    **CRITIC_FREE,
    **OFF_POLICY,
    **WITH_CRITIC,
    **OTHER_OBJECTIVES,
    **DISTILLATION,
    **AGENTS,
}


def preset_slots(name: str) -> dict[str, Any]:
    """A preset's slots as a plain dictionary; the error for an unknown name lists the table."""
    if name not in PRESETS:
        raise unknown_name_error("algorithm", name, PRESETS)
    return {"preset": name, **PRESETS[name].slots}
