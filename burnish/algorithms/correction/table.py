"""Slot `correction`: the policy that samples is never quite the policy that is trained; measured, corrected, rejected.

`seed_correction` and `decoupled_correction` are computed once on a batch, before advantages; `bypass_correction` inside
the loss, on a view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from burnish.algorithms.correction.budget import budget_correction
from burnish.algorithms.correction.corrections import (
    bypass_correction,
    coupled_correction,
    decoupled_correction,
    no_correction,
)

CORRECTIONS: dict[str, Callable[..., Any]] = {
    "none": no_correction,
    "seed": coupled_correction,
    "decoupled": decoupled_correction,
    "bypass": bypass_correction,
    "budget": budget_correction,
}
