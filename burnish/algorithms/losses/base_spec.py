"""Base classes of the records of the slots `clip` and `loss`."""

from __future__ import annotations

from typing import ClassVar, Literal

from burnish.config.records import Slot

Scope = Literal["token", "sequence", "group", "batch"]
"""What a loss must see at once, from the narrowest to the widest."""


class Clip(Slot):
    """A choice for the slot `clip`."""

    losses: ClassVar[tuple[str, ...]] = ("surrogate",)
    """The losses it goes with."""
    ratios: ClassVar[tuple[str, ...]] = ("token",)
    """The ratios it goes with."""
    level: ClassVar[Literal["token", "sequence"]] = "token"
    """Whether its result is one number per token or per sequence."""
    takes_weights: ClassVar[bool] = True
    """Whether rollout correction may multiply the loss by its weights: not if the clip is a weight to the same policy already."""


class LossRecord(Slot):
    """A choice for the slot `loss`."""

    advantages: ClassVar[tuple[str, ...] | None] = None
    """The advantages it goes with; None means any."""
    anchored: ClassVar[bool] = False
    """Whether its anchor is the reference if there is one (the start of the iteration), else the old policy."""
    level: ClassVar[Literal["token", "sequence"]] = "token"
    """`sequence`: one number per sequence, averaged by aggregation seq-mean-token-mean."""
    command: ClassVar[str] = "train"
    """The burnish command that runs it."""
