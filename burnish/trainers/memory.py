"""The memory plan against what a run really held: told once the first updates are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from burnish.controller.memory import Planned
from burnish.training.plan_text import error_text
from burnish.training.planner import GIB


@dataclass
class MemoryWatch:
    """Compares the plan of a stage with the measured peak, until an update has found the optimizer's state in place."""

    planned: Planned
    stage: str
    is_done: bool = False

    def after(self, updates: int, values: dict[str, float], tell: Callable[[str], None]) -> dict[str, float]:
        """Metrics of the plan's error; `updates` are those the policy's learner has made, `values` what was measured of a step."""
        measured, made = values.get("memory/peak_gib"), self.planned.stages.get(self.stage)
        if self.is_done or not updates or measured is None or made is None:
            return {}
        expected = made.learners_peak(updates) if self.planned.is_gpu else made.total
        error, text = error_text(expected, int(measured * GIB))
        self.is_done = updates > 1
        if self.planned.is_gpu:  # the resident size of a process is more than its tensors
            tell(text)
        return {"memory/planned_gib": expected / GIB, "memory/plan_error": error}
