"""Slots `ratio`, `clip` and `loss`: what is minimised at each token."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.slots.base import Slot


class TokenRatio(Slot):
    """One importance ratio per token."""

    formula: ClassVar[str] = "r_t = exp(clamp(logp_t - old_t, -20, 20))"
    name: Literal["token"] = "token"


class NoRatio(Slot):
    """No importance ratio: the loss uses log-probs directly."""

    name: Literal["none"] = "none"


class PpoClip(Slot):
    """PPO's pessimistic clip, optionally asymmetric (clip-higher) and dual."""

    formula: ClassVar[str] = "max(-A r, -A clip(r, 1-low, 1+high)); dual: for A<0 at most -A*dual"
    paper: ClassVar[str] = "PPO (1707.06347); dual clip (1912.09729); clip-higher: DAPO (2503.14476)"
    name: Literal["ppo"] = "ppo"
    low: float = Field(0.2, ge=0)
    """The ratio is clipped below at 1 - low."""
    high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + high."""
    dual: float | None = Field(None, gt=1)
    """Upper bound on the loss of negative advantages, as a ratio; null leaves it unbounded."""


class NoClip(Slot):
    """The ratio as it is."""

    name: Literal["none"] = "none"


class SurrogateLoss(Slot):
    """The ratio times the advantage."""

    formula: ClassVar[str] = "L_t = CLIP(-A_t r_t)"
    name: Literal["surrogate"] = "surrogate"


class LogprobLoss(Slot):
    """Plain policy gradient."""

    formula: ClassVar[str] = "L_t = -A_t logp_t"
    name: Literal["logprob"] = "logprob"


RATIOS: tuple[type[Slot], ...] = (TokenRatio, NoRatio)
CLIPS: tuple[type[Slot], ...] = (PpoClip, NoClip)
LOSSES: tuple[type[Slot], ...] = (SurrogateLoss, LogprobLoss)
