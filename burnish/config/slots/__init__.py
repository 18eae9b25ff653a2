"""The slots of an algorithm: every choice of every slot, as records."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from burnish.config.slots.advantages import ADVANTAGES
from burnish.config.slots.base import Plugin, Record, Slot, choice, tagged
from burnish.config.slots.correction import CORRECTIONS, CorrectionSlot
from burnish.config.slots.curriculum import CURRICULA, CurriculumSlot
from burnish.config.slots.filters import FILTERS, Refill
from burnish.config.slots.losses import OTHER_LOSSES
from burnish.config.slots.policy import CLIPS, LOSSES, RATIOS
from burnish.config.slots.shaping import SHAPERS
from burnish.config.slots.terms import REFERENCES, Aggregation, Auxiliary, Entropy, Kl, KlLoss, KlReward

__all__ = [
    "TABLE",
    "AdvantageSlot",
    "Aggregation",
    "AggregationSlot",
    "Auxiliary",
    "ClipSlot",
    "CorrectionSlot",
    "CurriculumSlot",
    "Entropy",
    "FilterSlot",
    "Kl",
    "KlLoss",
    "KlReward",
    "LossSlot",
    "Plugin",
    "RatioSlot",
    "Record",
    "Refill",
    "ShaperSlot",
    "Slot",
]

TABLE: dict[str, tuple[type[Slot], ...]] = {
    "advantage": ADVANTAGES,
    "ratio": RATIOS,
    "clip": CLIPS,
    "loss": (*LOSSES, *OTHER_LOSSES),
    "reference": REFERENCES,
    "filters": FILTERS,
    "shaping": SHAPERS,
    "curriculum": CURRICULA,
    "correction": CORRECTIONS,
}

AdvantageSlot = choice(*TABLE["advantage"])
RatioSlot = choice(*TABLE["ratio"], plugin=False)
ClipSlot = choice(*TABLE["clip"], plugin=False)
LossSlot = choice(*TABLE["loss"])
FilterSlot = choice(*TABLE["filters"])
ShaperSlot = choice(*TABLE["shaping"])
AggregationSlot = Annotated[Aggregation, BeforeValidator(tagged)]
