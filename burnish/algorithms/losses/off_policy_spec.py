"""Records of clips and losses for samples of an older policy: VESPO, TOPR, M2PO, REC, OPMD and A*-PO."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from burnish.algorithms.losses.base_spec import Clip, LossRecord, Scope


class GammaClip(Clip):
    """A smooth weight of the whole sequence's ratio, which vanishes where the ratio is far from 1, instead of a clip."""

    formula: ClassVar[str] = (
        "w_i = sg(exp(lam + k log W - lam W)), W = exp(sum_t l_t) with log W in [log 1e-8, 20]; k, lam of the sign of A; the weights of a "
        "rollout correction are part of W"
    )
    paper: ClassVar[str] = "VESPO (2602.10693)"
    scope: ClassVar[Scope] = "sequence"
    losses: ClassVar[tuple[str, ...]] = ("sg_logprob",)
    name: Literal["gamma"] = "gamma"
    k_positive: float = Field(2.0, gt=0)
    """k for A >= 0; the weight is largest at W = k / lam."""
    lam_positive: float = Field(3.0, ge=1e-4)
    """lam for A >= 0."""
    k_negative: float = Field(3.0, gt=0)
    """k for A < 0."""
    lam_negative: float = Field(2.0, ge=1e-4)
    """lam for A < 0."""


class TaperClip(Clip):
    """Weight 1 for advantages above a threshold, the ratio up to 1 for the others: what became unlikely is not pushed down further."""

    formula: ClassVar[str] = (
        "w = 1 if A > threshold else sg(min(r, 1)); the paper's ratio is of whole sequences (seq_prod)"
    )
    paper: ClassVar[str] = "TOPR (2503.14286); ratio token: Trinity-RFT's code"
    losses: ClassVar[tuple[str, ...]] = ("sg_logprob",)
    ratios: ClassVar[tuple[str, ...]] = ("seq_prod", "token")
    takes_weights: ClassVar[bool] = False
    name: Literal["taper"] = "taper"
    threshold: float = 0.0
    """Advantages above this have weight 1."""


class SecondMomentClip(Clip):
    """No gradient at the few tokens where engine and trainer differ most, so that the mean square of their log-ratio is below tau."""

    formula: ClassVar[str] = (
        "-A r, 0 at the k tokens of largest q = (behaviour - old)^2; k is the smallest number with mean(q of the others) < tau, at most "
        "all but one"
    )
    paper: ClassVar[str] = "M2PO (2510.01161), as in AReaL, but over a whole mini-batch"
    needs: ClassVar[tuple[str, ...]] = ("old",)
    name: Literal["second_moment"] = "second_moment"
    tau: float = Field(0.04, gt=0)
    """Bound of the mean squared log-ratio of the tokens that keep a gradient."""
    denominator: Literal["all", "kept"] = "all"
    """Tokens that the aggregation counts: all of the mini-batch, or those that keep a gradient (AReaL's code)."""
    low: float | None = Field(None, ge=0)
    """The ratio of kept tokens is clipped below at 1 - low as in PPO; null does not clip (AReaL's code clips)."""
    high: float | None = Field(None, ge=0)
    """The ratio of kept tokens is clipped above at 1 + high; null does not clip."""

    @model_validator(mode="after")
    def _check_both_bounds(self) -> SecondMomentClip:
        if (self.low is None) != (self.high is None):
            raise ValueError("second_moment.low and high make PPO's clip together: set both, or neither")
        return self


class RecLoss(LossRecord):
    """REINFORCE that drops tokens by their ratio and needs no importance weight; a family to ablate what stabilises stale samples."""

    formula: ClassVar[str] = (
        "L_t = -A w logp_t [keep] + square (logp_t - old_t)^2 - imitation logp_t, r = sg(exp(logp_t - old_t)); one_side: r <= 1+high (A>=0) "
        "or r >= 1-low (A<=0); two_side: 1-low <= r <= 1+high; ring: two_side, or r <= 1-outer_low (A>=0), or r >= 1+outer_high (A<=0)"
    )
    paper: ClassVar[str] = "REC (2509.24203), as in Trinity-RFT"
    name: Literal["rec"] = "rec"
    keep: Literal["all", "one_side", "two_side", "ring"] = "all"
    """Which tokens have a gradient, by their ratio; the others stay in the denominators."""
    low: float = Field(0.2, ge=0)
    """How far the ratio may fall below 1."""
    high: float = Field(0.2, ge=0)
    """How far the ratio may rise above 1."""
    outer_low: float = Field(0.6, ge=0)
    """keep ring: ratios up to 1 - outer_low are kept too for A >= 0."""
    outer_high: float = Field(2.0, ge=0)
    """keep ring: ratios from 1 + outer_high on are kept too for A <= 0."""
    weight: Literal["none", "ratio", "advantage"] = "none"
    """w: 1, the ratio (with keep one_side PPO's gradient), or exp(A / temperature)."""
    temperature: float = Field(1.0, gt=0)
    """Of weight advantage."""
    square: float = Field(0.0, ge=0)
    """Weight of the squared log-ratio, at every token."""
    imitation: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood, at every token."""

    @model_validator(mode="after")
    def _check_options_are_used(self) -> RecLoss:
        def is_set(*names: str) -> bool:
            return any(getattr(self, name) != RecLoss.model_fields[name].default for name in names)

        if self.keep == "all" and is_set("low", "high"):
            raise ValueError("rec.low and high bound the ratio, and keep is all: set keep=one_side, two_side or ring")
        if self.keep != "ring" and is_set("outer_low", "outer_high"):
            raise ValueError(f"rec.outer_low and outer_high belong to keep ring, not {self.keep}: leave them out")
        if self.keep == "ring" and (self.outer_low < self.low or self.outer_high < self.high):
            raise ValueError("rec.outer_low and outer_high begin the outer ring, so they must be at least low and high")
        if self.weight != "advantage" and is_set("temperature"):
            raise ValueError(f"rec.temperature belongs to weight advantage, not {self.weight}: leave it out")
        return self


class OpmdLoss(LossRecord):
    """A mirror-descent step in its simple form: plain policy gradient, scaled so that tau can be tuned at a fixed learning rate."""

    formula: ClassVar[str] = "L_t = -A_t logp_t / (1 + tau)"
    paper: ClassVar[str] = "OPMD, as in Trinity-RFT"
    name: Literal["opmd"] = "opmd"
    tau: float = Field(1.0, ge=0)
    """Strength of the pull towards the old policy; it only scales the step."""


class AstarLoss(LossRecord):
    """Regresses a sequence's log-ratio to the reference on its advantage over the prompt's optimal value; one sample a prompt is enough."""

    formula: ClassVar[str] = "L_i = (beta z_i - A_i)^2, z_i = sum_t (logp_t - ref_t)"
    paper: ClassVar[str] = "A*-PO (2505.20686), as in TRL"
    needs: ClassVar[tuple[str, ...]] = ("reference",)
    scope: ClassVar[Scope] = "sequence"
    advantages: ClassVar[tuple[str, ...]] = ("offline_value",)
    level: ClassVar[Literal["token", "sequence"]] = "sequence"
    anchored: ClassVar[bool] = True
    name: Literal["astar_sq"] = "astar_sq"
    beta: float = Field(1e-3, gt=0)
    """Strength of the KL to the reference that the optimal policy has."""


OFF_POLICY_CLIPS: tuple[type[Clip], ...] = (GammaClip, TaperClip, SecondMomentClip)
OFF_POLICY_LOSSES: tuple[type[LossRecord], ...] = (RecLoss, OpmdLoss, AstarLoss)
