"""Aggregation, and the terms beside the policy loss: KL, entropy."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.slots.base import Record, Slot


class Aggregation(Slot):
    """How the per-token losses become one number; counts are those of the whole mini-batch."""

    formula: ClassVar[str] = "L = sum_t weight_t L_t, the weights fixed before the mini-batch is split"
    name: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    """What is averaged and what is summed."""
    horizon: int | None = Field(None, ge=1)
    """The constant divisor of `seq-mean-token-sum-norm`; null means rollout.max_tokens."""


Estimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


class KlTerm(Record):
    """One use of a KL estimate."""

    estimator: Estimator = "k3"
    """k1 = d, abs = |d|, k2 = d^2/2, k3 = exp(-d)+d-1 with d = logp - ref; a plus means value of it, gradient of k2."""
    coef: float = Field(0.0, ge=0)
    """Its weight; 0 turns it off."""


class Kl(Record):
    """Keeping the policy near a reference (Schulman's estimators)."""

    loss: KlTerm = KlTerm(estimator="k3")
    """Added to the loss, with gradient."""
    reward: KlTerm = KlTerm(estimator="k1")
    """Taken off each token's reward, without gradient."""
    reference: Literal["none", "frozen"] = "none"
    """Which policy to stay near: none, or the weights the run started from."""


class Entropy(Record):
    """Entropy bonus."""

    coef: float = Field(0.0, ge=0)
    """Weight of the mean entropy taken off the loss."""
