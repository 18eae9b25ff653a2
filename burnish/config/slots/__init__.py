"""The slots of an algorithm: every choice of every slot, as records."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from burnish.config.slots.advantages import ADVANTAGES
from burnish.config.slots.base import Plugin, Record, Slot, choice, tagged
from burnish.config.slots.filters import FILTERS
from burnish.config.slots.policy import CLIPS, LOSSES, RATIOS
from burnish.config.slots.terms import Aggregation, Entropy, Kl, KlTerm

__all__ = ["TABLE", "Aggregation", "Entropy", "Kl", "KlTerm", "Plugin", "Record", "Slot"]

TABLE = {"advantage": ADVANTAGES, "ratio": RATIOS, "clip": CLIPS, "loss": LOSSES, "filters": FILTERS}

AdvantageSlot = choice(*ADVANTAGES)
RatioSlot = choice(*RATIOS, plugin=False)
ClipSlot = choice(*CLIPS, plugin=False)
LossSlot = choice(*LOSSES)
FilterSlot = choice(*FILTERS)
AggregationSlot = Annotated[Aggregation, BeforeValidator(tagged)]
