"""Slot `advantage`: how rewards become advantages."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.slots.base import Slot


class GrpoAdvantage(Slot):
    """Reward relative to its group, optionally divided by a standard deviation."""

    formula: ClassVar[str] = (
        "A_i = (r_i - mean_g) / (std_g + eps), the same on every token; a constant group gives exactly 0"
    )
    paper: ClassVar[str] = "DeepSeekMath (2402.03300); std: none is Dr.GRPO (2503.20783)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    name: Literal["grpo"] = "grpo"
    std: Literal["group", "none", "batch"] = "group"
    """Divide by the group's sample deviation, by nothing (Dr.GRPO), or by that of all rewards in the batch."""
    eps: float = Field(1e-6, ge=0)
    """Added to the deviation before dividing."""
    singleton: Literal["raw", "zero"] = "raw"
    """The advantage of a group of one: its raw reward, or zero."""


class ReinforceAdvantage(Slot):
    """Discounted return-to-go minus a constant."""

    formula: ClassVar[str] = "A_it = sum_{s>=t} gamma^(s-t) r_is - baseline, over the tokens the model wrote"
    paper: ClassVar[str] = "Williams (1992)"
    name: Literal["reinforce"] = "reinforce"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per written token."""
    baseline: float = 0.0
    """A constant taken off every return."""


ADVANTAGES: tuple[type[Slot], ...] = (GrpoAdvantage, ReinforceAdvantage)
