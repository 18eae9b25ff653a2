"""Slot `loss`: the records of the distillation family (docs/distillation.md)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from burnish.algorithms.losses.base_spec import LossRecord


class DivergenceLoss(LossRecord):
    """Distillation: the divergence between policy and teacher (kl.reference) at every token of the policy's own answers."""

    formula: ClassVar[str] = (
        "L_t = D_t min(sg(r_t), cap), D = KL(Q||S) (alpha 0), KL(S||Q) (alpha 1) or alpha KL(Q||M) + (1-alpha) KL(S||M), "
        "M = (1-alpha) S + alpha Q; sampled: D_t = sg(logp - teacher) logp; total (1-weight) PPO + weight L"
    )
    paper: ClassVar[str] = "GKD (2306.13649); SDPO (2601.20802); SDFT (2601.19897)"
    needs: ClassVar[tuple[str, ...]] = ("reference",)
    name: Literal["divergence"] = "divergence"
    alpha: float = Field(1.0, ge=0, le=1)
    """0: forward KL(teacher || policy), which covers what the teacher does. 1: reverse KL(policy || teacher), which seeks its mode. Between
    them: generalised Jensen-Shannon."""
    support: Literal["full", "student", "teacher", "sampled"] = "full"
    """Tokens that are compared: the vocabulary, the likeliest `top` of the policy or of the teacher, or the sampled token alone."""
    top: int | None = Field(None, ge=1)
    """With support student or teacher: how many tokens."""
    rest: Literal["renormalise", "tail", "raw"] = "renormalise"
    """With `top`, the other tokens: renormalise divides both sides by the mass of the compared ones, tail makes one token of them, raw
    leaves them out."""
    cap: float | None = Field(None, gt=0)
    """Weight each token by its ratio to the policy that sampled, at most this, without gradient; null does not weight."""
    weight: float = Field(1.0, gt=0, le=1)
    """Weight of the divergence; the rest is PPO's clipped loss of the advantages."""
    clip: float = Field(0.2, gt=0, lt=1)
    """With weight below 1: PPO's clip, 1 - clip .. 1 + clip."""

    @model_validator(mode="after")
    def _check_options_are_used(self) -> DivergenceLoss:
        ranked = self.support in ("student", "teacher")
        if ranked and self.top is None:
            raise ValueError(f"support {self.support} compares the likeliest tokens: set top, for example 100")
        if not ranked and (self.top is not None or self.rest != "renormalise"):
            raise ValueError(f"top and rest belong to support student or teacher; with {self.support} they do nothing")
        if self.support == "sampled" and self.alpha != 1:
            raise ValueError("support sampled estimates KL(policy || teacher) from the sampled token: set alpha=1")
        if self.weight == 1 and self.clip != DivergenceLoss.model_fields["clip"].default:
            raise ValueError("clip belongs to the policy loss, which has no part in the loss with weight=1")
        return self


class TeacherSurrogateLoss(LossRecord):
    """Policy gradient on the teacher's judgement of each token, which follows the policy through the updates of a batch."""

    formula: ClassVar[str] = (
        "L_t = -keep_t A_t exp(logp_t - rollout_t) + anchor_coef (logp_t - rollout_t)^2, A_t = sg(teacher_t - logp_t), "
        "keep: p - p_rollout >= -fall"
    )
    paper: ClassVar[str] = "OPSD (prime-rl); squared anchor: Kimi K2.5"
    needs: ClassVar[tuple[str, ...]] = ("reference",)
    advantages: ClassVar[tuple[str, ...]] = ("none",)
    name: Literal["teacher_surrogate"] = "teacher_surrogate"
    fall: float | None = Field(0.2, ge=0)
    """Tokens whose probability fell by more than this since they were sampled keep only the anchor; null keeps all."""
    anchor_coef: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio to the policy that sampled, on all tokens."""


class GoldLoss(LossRecord):
    """Distillation from a teacher with another tokenizer: groups of tokens that spell the same bytes are compared."""

    formula: ClassVar[str] = (
        "L_g = w_m JSD_alpha(S_g, Q_g on shared tokens) + w_u |sort S_g - sort Q_g| on the others; S_g, Q_g: the distribution at a group's "
        "first token times p(later tokens) (observed), or at its last times p(earlier tokens) (bayesian); a group counts as one token"
    )
    paper: ClassVar[str] = "GOLD (TRL); ULD (2402.12030)"
    needs: ClassVar[tuple[str, ...]] = ("reference",)
    advantages: ClassVar[tuple[str, ...]] = ("none",)
    name: Literal["gold"] = "gold"
    alpha: float = Field(0.5, ge=0, le=1)
    """On shared tokens: 0 is KL(teacher || policy), 1 is KL(policy || teacher), between them generalised Jensen-Shannon."""
    merge: Literal["observed", "bayesian"] = "observed"
    """The distribution of a group of several tokens: the one at its first token times the probabilities of the later ones, or the one at
    its last token times those of the earlier ones, each at least 1e-8."""
    compare: Literal["hybrid", "sorted"] = "hybrid"
    """hybrid: shared tokens by their divergence, others by sorted masses. sorted: all tokens by sorted masses (plain ULD)."""
    matched_weight: float | None = Field(None, ge=0, le=1)
    """w_m; null is the share of the teacher's vocabulary that the policy has too."""
    unmatched_weight: float | None = Field(None, ge=0)
    """w_u; null is 1 - w_m."""

    @model_validator(mode="after")
    def _check_hybrid_options(self) -> GoldLoss:
        for name in ("alpha", "matched_weight", "unmatched_weight"):
            if self.compare == "sorted" and getattr(self, name) != GoldLoss.model_fields[name].default:
                raise ValueError(f"{name} belongs to compare hybrid; with sorted it does nothing")
        if self.matched_weight == self.unmatched_weight == 0:
            raise ValueError("matched_weight and unmatched_weight are both 0, so there is no loss: set one of them")
        return self


DISTILLATION_LOSSES: tuple[type[LossRecord], ...] = (DivergenceLoss, TeacherSurrogateLoss, GoldLoss)
