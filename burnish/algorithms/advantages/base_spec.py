"""What the records of the slot `advantage` have in common."""

from __future__ import annotations

from typing import ClassVar, Literal

from burnish.config.records import Slot

Singleton = Literal["raw", "zero"]
Ddof = Literal[0, 1]
DEFAULT_EPS = 1e-6


def refuse_unused_deviation_options(by: str, eps: float, ddof: int = 1) -> None:
    """Raises if options of a division by the deviation are set and there is no division."""
    if by == "none" and (eps != DEFAULT_EPS or ddof != 1):
        raise ValueError("eps and ddof belong to the division by a deviation, which is off here: leave them out")


class AdvantageRecord(Slot):
    """A choice for the slot `advantage`."""

    reads_reward: ClassVar[bool] = True
    """Whether it depends on the reward of a sample, which includes shaping and KL in the reward."""
    is_shift_free: ClassVar[bool] = False
    """Whether adding the same number to all rewards of a group leaves it unchanged."""
    by_token: ClassVar[bool] = False
    """Whether every token has its own return-to-go, so that the position of a token reward matters."""
    by_turn: ClassVar[bool] = False
    """Whether every turn has a return of its own, so that it matters which turn has a reward."""
