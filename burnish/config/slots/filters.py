"""Slot `filters`: which groups are used and which samples stay in the loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from burnish.config.slots.base import Slot


class ZeroSignalFilter(Slot):
    """Drops groups whose rewards are all equal: they have no gradient, and would only dilute the mean."""

    formula: ClassVar[str] = "keep group g iff max_g r > min_g r or its size is 1"
    paper: ClassVar[str] = "DAPO (2503.14476), without its refill"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    name: Literal["zero_signal"] = "zero_signal"


class OverlongFilter(Slot):
    """Takes truncated samples out of the loss; they still count in their group's statistics."""

    formula: ClassVar[str] = "loss_mask of a truncated sequence := 0, after advantages"
    paper: ClassVar[str] = "DAPO (2503.14476)"
    name: Literal["overlong"] = "overlong"


FILTERS: tuple[type[Slot], ...] = (ZeroSignalFilter, OverlongFilter)
