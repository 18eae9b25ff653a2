"""Slot `correction`: the policy that samples is never quite the policy that is trained; measured, corrected, rejected.

`seed_correction` and `decoupled_correction` are computed once on a batch, before advantages; `bypass_correction` inside
the loss, on a view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from burnish.algorithms.correction.budget import BudgetState, budget_correction
from burnish.algorithms.correction.corrections import bypass_correction, decoupled_correction, measured, seed_correction
from burnish.algorithms.correction.profiles import Compared, compared, gap_profiles, worst_tokens
from burnish.algorithms.correction.weights_and_rejection import Corrected, sequence_weights

__all__ = [
    "CORRECTIONS",
    "BudgetState",
    "Compared",
    "Corrected",
    "budget_correction",
    "bypass_correction",
    "compared",
    "decoupled_correction",
    "gap_profiles",
    "measured",
    "seed_correction",
    "sequence_weights",
    "worst_tokens",
]

CORRECTIONS: dict[str, Callable[..., Any]] = {
    "none": measured,
    "seed": seed_correction,
    "decoupled": decoupled_correction,
    "bypass": bypass_correction,
    "budget": budget_correction,
}
