"""Slot `loss`, beyond the policy gradient: regression, classification, imitation and preference."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from burnish.config.records import Slot, choice


class LossRecord(Slot):
    """A choice of loss: which advantages it takes, and whether it is one number a token or a sequence."""

    advantages: ClassVar[tuple[str, ...] | None] = None
    """The choices of advantage it goes with; None means any."""
    anchored: ClassVar[bool] = False
    """Whether its log-ratio is to the reference where there is one (the iteration's start), else to the old policy."""
    level: ClassVar[Literal["token", "sequence"]] = "token"
    """`sequence`: one number a sequence, whose plain mean is taken (aggregation seq-mean-token-mean)."""
    command: ClassVar[str] = "train"
    """Which command of burnish runs it."""


class SurrogateLoss(LossRecord):
    """The ratio times the advantage."""

    formula: ClassVar[str] = "L_t = CLIP(-A_t r_t)"
    name: Literal["surrogate"] = "surrogate"


class LogprobLoss(LossRecord):
    """Plain policy gradient."""

    formula: ClassVar[str] = "L_t = -A_t logp_t"
    paper: ClassVar[str] = "Williams (1992)"
    name: Literal["logprob"] = "logprob"


class WeightedLogprobLoss(LossRecord):
    """Policy gradient with the clipped ratio as a constant weight."""

    formula: ClassVar[str] = "L_t = -sg(CLIP(r_t)) A_t logp_t"
    paper: ClassVar[str] = "CISPO, MiniMax-M1 (2506.13585)"
    name: Literal["sg_logprob"] = "sg_logprob"


class OmdLoss(LossRecord):
    """Online mirror descent: pulls a sequence's log-ratio towards advantage / tau. Kimi's, without a value model."""

    formula: ClassVar[str] = "L_i = -A_i z_i + tau/2 z_i^2, z_i = sum_t (logp_t - anchor_t)"
    paper: ClassVar[str] = "Kimi k1.5 (2501.12599)"
    scope: ClassVar[Literal["sequence"]] = "sequence"
    advantages: ClassVar[tuple[str, ...]] = ("grpo", "softmean")
    level: ClassVar[Literal["sequence"]] = "sequence"
    anchored: ClassVar[bool] = True
    name: Literal["omd_sq"] = "omd_sq"
    tau: float = Field(0.1, gt=0)
    """Strength of the pull towards the policy that sampled."""


class SppoLoss(LossRecord):
    """Self-play preference optimisation: the log-ratio becomes a multiple of how often a sample beats the others."""

    formula: ClassVar[str] = "L_i = (z_i - eta A_i)^2, z_i = sum_t (logp_t - anchor_t), A_i = P_i - 1/2"
    paper: ClassVar[str] = "SPPO (2405.00675)"
    scope: ClassVar[Literal["sequence"]] = "sequence"
    advantages: ClassVar[tuple[str, ...]] = ("win_rate", "softmean")
    level: ClassVar[Literal["sequence"]] = "sequence"
    anchored: ClassVar[bool] = True
    name: Literal["sppo_sq"] = "sppo_sq"
    eta: float = Field(1.0, gt=0)
    """How far one iteration moves; the paper uses about 1000."""


class DroLoss(LossRecord):
    """Plain policy gradient with a square that holds each token near the policy that sampled."""

    formula: ClassVar[str] = "L_t = -A_t logp_t + beta/2 (logp_t - old_t)^2"
    paper: ClassVar[str] = "Offline regularised RL (2405.19107), token by token"
    name: Literal["dro"] = "dro"
    beta: float = Field(0.1, ge=0)
    """Weight of the square."""


class BceLoss(LossRecord):
    """Classifies answers as right or wrong by how much likelier they have become, relative to their group."""

    formula: ClassVar[str] = (
        "L_i = w_i BCE(sigmoid(psi_i - mean_{j!=i} psi_j), accuracy_i), psi_i = beta sum_t (logp_t - old_t)"
    )
    paper: ClassVar[str] = "PACS (2509.02522)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "accuracy")
    scope: ClassVar[Literal["group"]] = "group"
    advantages: ClassVar[tuple[str, ...]] = ("none",)
    level: ClassVar[Literal["sequence"]] = "sequence"
    name: Literal["bce"] = "bce"
    beta: float = Field(1.0, gt=0)
    """Scale of the score."""
    normalise: Literal["rloo", "grpo", "naive"] = "rloo"
    """Take off the mean of the other samples, or the group's mean and deviation, or nothing."""
    class_weights: bool = True
    """Give right and wrong answers of a prompt the same total weight."""
    per_token: bool = False
    """Score by the mean log-prob of an answer instead of its summed log-ratio."""


class MixedLoss(LossRecord):
    """The policy's samples with their ratio, demonstrations with a weight made of how likely the policy finds them, in one group."""

    formula: ClassVar[str] = (
        "L_t = -A_t r_t; on demonstrations -A_t (1 - sg(p))^focus w, p = exp(logp_t), w = p/(p + gamma) (shaped), p/q (author) or "
        "2p/(p_old + (p_old + 1)/2) (mixture)"
    )
    paper: ClassVar[str] = "LUFFY (2504.14945); mixture and focus: RL-PLUS (2508.00222)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "demonstrations")
    name: Literal["mixed_offpolicy"] = "mixed_offpolicy"
    weight: Literal["shaped", "author", "mixture"] = "shaped"
    """What a demonstrated token counts: a shape of its probability, that over its author's (rows with `logp`), or over the mean of
    the old policy's and a guess of its author's."""
    gamma: float = Field(0.1, gt=0)
    """With weight shaped: the probability at which a demonstrated token's gradient is largest."""
    focus: float = Field(0.0, ge=0)
    """Weigh demonstrated tokens down as they become likely; RL-PLUS has 0.5."""
    clip: float | None = Field(None, gt=0, lt=1)
    """PPO's clip of the policy's own tokens to 1 - clip .. 1 + clip; null leaves their ratio free, as LUFFY's code does."""

    @model_validator(mode="after")
    def _one_shape(self) -> MixedLoss:
        if self.weight != "shaped" and self.gamma != MixedLoss.model_fields["gamma"].default:
            raise ValueError(f"gamma belongs to weight shaped: with weight {self.weight} it does nothing")
        return self


class ImitationLoss(LossRecord):
    """Imitates every token in the loss, whatever its reward: with filter positives_only, of right answers alone."""

    formula: ClassVar[str] = "L_t = -logp_t"
    advantages: ClassVar[tuple[str, ...]] = ("none",)
    name: Literal["nll"] = "nll"


class PairLoss(LossRecord):
    """A choice of loss on a chosen and a rejected answer to each prompt."""

    needs: ClassVar[tuple[str, ...]] = ("groups",)
    command: ClassVar[str] = "prefer"
    scope: ClassVar[Literal["group"]] = "group"
    advantages: ClassVar[tuple[str, ...]] = ("none",)
    level: ClassVar[Literal["sequence"]] = "sequence"


class DpoLoss(PairLoss):
    """Direct preference optimisation: the chosen answer gains on the rejected one, relative to the reference."""

    formula: ClassVar[str] = "L = -(1-e) logsig(beta h) - e logsig(-beta h), h = (logp_c - ref_c) - (logp_r - ref_r)"
    paper: ClassVar[str] = "DPO (2305.18290)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "reference")
    name: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """Scale of the implicit reward beta (logp - ref)."""
    smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of preferences taken to be the wrong way round."""
    average: bool = False
    """Average each answer's log-ratio over its tokens, so that length does not decide (Tulu 3); beta is then 5 or so."""


class IpoLoss(PairLoss):
    """A bounded DPO: the chosen answer should be ahead by 1 / (2 beta), not by as much as possible."""

    formula: ClassVar[str] = "L = (h - 1/(2 beta))^2, h as in dpo"
    paper: ClassVar[str] = "IPO (2310.12036)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "reference")
    name: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0)
    """The smaller, the further ahead."""
    average: bool = True
    """Average each answer's log-ratio over its tokens, so that length does not decide; false sums it."""


class SimpoLoss(PairLoss):
    """Preference by mean log-prob, with a margin and without a reference."""

    formula: ClassVar[str] = "L = -logsig(beta (mean logp_c - mean logp_r) - margin)"
    paper: ClassVar[str] = "SimPO (2405.14734)"
    name: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    """Scale of the difference."""
    margin: float = Field(0.5, ge=0)
    """How far ahead the chosen answer should be, in scaled units."""


class OrpoLoss(PairLoss):
    """Imitates the chosen answer and raises its odds over the rejected one's, without a reference."""

    formula: ClassVar[str] = (
        "L = -mean logp_c - coef logsig(log odds_c - log odds_r), odds = p/(1-p), p = exp(mean logp)"
    )
    paper: ClassVar[str] = "ORPO (2403.07691)"
    name: Literal["orpo"] = "orpo"
    coef: float = Field(0.1, gt=0)
    """Weight of the odds beside the imitation."""


class KtoLoss(LossRecord):
    """Good and bad answers without pairs, valued against how far the policy is from the reference."""

    formula: ClassVar[str] = (
        "good: desirable (1 - sig(beta (u - z0))); bad: undesirable (1 - sig(beta (z0 - u))); u = logp - ref, "
        "z0 = max(0, mean u of mismatched rows)"
    )
    paper: ClassVar[str] = "KTO (2402.01306)"
    needs: ClassVar[tuple[str, ...]] = ("reference",)
    command: ClassVar[str] = "prefer"
    scope: ClassVar[Literal["batch"]] = "batch"
    advantages: ClassVar[tuple[str, ...]] = ("none",)
    level: ClassVar[Literal["sequence"]] = "sequence"
    name: Literal["kto"] = "kto"
    beta: float = Field(0.1, gt=0)
    """Scale of the implicit reward beta (logp - ref)."""
    desirable: float = Field(1.0, ge=0)
    """Weight of good answers; weight times number should be 1 to 4/3 of that of bad ones."""
    undesirable: float = Field(1.0, ge=0)
    """Weight of bad answers."""


PREFERENCE_LOSS_RECORDS: tuple[type[Slot], ...] = (DpoLoss, IpoLoss, SimpoLoss, OrpoLoss, KtoLoss)
"""What `burnish prefer` minimises."""
PreferenceSlot = choice(*PREFERENCE_LOSS_RECORDS, plugin=False)

LOSS_RECORDS: tuple[type[Slot], ...] = (
    SurrogateLoss,
    LogprobLoss,
    WeightedLogprobLoss,
    OmdLoss,
    SppoLoss,
    DroLoss,
    BceLoss,
    MixedLoss,
    ImitationLoss,
    *PREFERENCE_LOSS_RECORDS,
)
