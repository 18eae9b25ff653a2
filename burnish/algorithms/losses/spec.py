"""Slots `ratio`, `clip` and `loss`: the records of the policy loss and of the losses that take its place."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from pydantic import Field, model_validator

from burnish.algorithms.losses.base_spec import Clip, LossRecord, Scope
from burnish.algorithms.losses.distillation_spec import DISTILLATION_LOSSES
from burnish.algorithms.losses.off_policy_spec import OFF_POLICY_CLIPS, OFF_POLICY_LOSSES
from burnish.config.records import Plugin, Slot, choice

# --- Ratio


class TokenRatio(Slot):
    """One importance ratio per token."""

    formula: ClassVar[str] = "r_t = exp(clamp(logp_t - old_t, -20, 20))"
    paper: ClassVar[str] = "PPO (1707.06347)"
    name: Literal["token"] = "token"


class SequenceRatio(Slot):
    """One ratio per sequence: the geometric mean of its token ratios. A trajectory of several sequences has one ratio."""

    formula: ClassVar[str] = "s_i = exp(min(mean_t (logp_t - old_t), 10)), the gradient through the mean"
    paper: ClassVar[str] = "GSPO (2507.18071)"
    scope: ClassVar[Scope] = "sequence"
    name: Literal["sequence"] = "sequence"


class SequenceTokenRatio(Slot):
    """The value of the sequence's ratio with each token's own gradient, for advantages that differ inside a sequence.

    A trajectory of several sequences has one ratio.
    """

    formula: ClassVar[str] = "s_it = sg(s_i) exp(logp_it - sg(logp_it))"
    paper: ClassVar[str] = "GSPO-token (2507.18071)"
    scope: ClassVar[Scope] = "sequence"
    name: Literal["seq_token"] = "seq_token"


class SequenceProductRatio(Slot):
    """The ratio of whole sequences, without length normalisation. A trajectory of several sequences has one ratio."""

    formula: ClassVar[str] = "exp(min(sum_t (logp_t - old_t), 10))"
    scope: ClassVar[Scope] = "sequence"
    name: Literal["seq_prod"] = "seq_prod"


class NoRatio(Slot):
    """No importance ratio: the loss uses log-probs directly."""

    name: Literal["none"] = "none"


# --- Clip


class PpoClip(Clip):
    """PPO's pessimistic clip. Options: an asymmetric range (clip-higher), a dual clip, a mask for sequences that drifted."""

    formula: ClassVar[str] = (
        "max(-A r, -A clip(r, 1-low, 1+high)); dual: for A<0 at most -A*dual; drift: 0 if A<0 and mean_t(old-logp) > drift"
    )
    paper: ClassVar[str] = (
        "PPO (1707.06347); dual clip (1912.09729); clip-higher: DAPO (2503.14476); drift: DeepSeek-V3.2 (2512.02556)"
    )
    ratios: ClassVar[tuple[str, ...]] = ("token", "sequence", "seq_token", "seq_prod")
    name: Literal["ppo"] = "ppo"
    low: float = Field(0.2, ge=0)
    """The ratio is clipped below at 1 - low."""
    high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + high."""
    dual: float | None = Field(None, gt=1)
    """Upper bound of the ratio for negative advantages; null leaves it unbounded."""
    drift: float | None = Field(None, ge=0)
    """Tokens with a negative advantage have loss 0 in sequences with mean_t(old - logp) above this; null sets no limit."""


class NoClip(Clip):
    """The ratio without a bound."""

    formula: ClassVar[str] = "-A r"
    ratios: ClassVar[tuple[str, ...]] = ("token", "sequence", "seq_token", "seq_prod")
    name: Literal["none"] = "none"


class LogGeoClip(Clip):
    """Log-ratios clipped token by token, then averaged over the sequence, or over all sequences of a trajectory."""

    formula: ClassVar[str] = (
        "-a_i exp(mean_t x_t), x = min(l, clip(l, -low, high)) if A>0 else max of the two; a_i = mean_t A_t"
    )
    paper: ClassVar[str] = "GMPO (2507.20673)"
    scope: ClassVar[Scope] = "sequence"
    ratios: ClassVar[tuple[str, ...]] = ("sequence",)
    level: ClassVar[Literal["token", "sequence"]] = "sequence"
    name: Literal["log_geo"] = "log_geo"
    low: float = Field(0.4, ge=0)
    """Log-ratios of tokens with A <= 0 are clipped below at -low."""
    high: float = Field(0.4, ge=0)
    """Log-ratios of tokens with A > 0 are clipped above at high."""


class ImportanceWeightClip(Clip):
    """The clipped ratio as a constant weight of log-probs, so that every token keeps a gradient."""

    formula: ClassVar[str] = "w = sg(clip(r, 1-low, cap))"
    paper: ClassVar[str] = "CISPO, MiniMax-M1 (2506.13585); cap 5: ScaleRL (2510.13786)"
    losses: ClassVar[tuple[str, ...]] = ("sg_logprob",)
    ratios: ClassVar[tuple[str, ...]] = ("token", "sequence", "seq_prod")
    name: Literal["is_weight"] = "is_weight"
    low: float | None = Field(None, ge=0, lt=1)
    """The weight is at least 1 - low; null sets no lower bound."""
    cap: float = Field(1.2, ge=1)
    """The weight is at most this."""


class SoftClip(Clip):
    """A smooth gate instead of a hard clip, steeper for negative advantages."""

    formula: ClassVar[str] = "-A sigmoid(tau (r-1)) 4/tau, tau = tau_positive if A>0 else tau_negative"
    paper: ClassVar[str] = "SAPO (2511.20347)"
    name: Literal["soft"] = "soft"
    tau_positive: float = Field(1.0, gt=0)
    """Steepness for A > 0: how fast a token loses its gradient away from r = 1."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness for A <= 0."""


class CovarianceClip(Clip):
    """PPO's clip, and no gradient at a few tokens drawn from those with high covariance of advantage and log-prob."""

    formula: ClassVar[str] = (
        "0 at max(1, int(share*tokens)) tokens drawn where low_cov < (A - mean A)(logp - mean logp) < high_cov, else PPO"
    )
    paper: ClassVar[str] = "Clip-Cov (2505.22617)"
    scope: ClassVar[Scope] = "batch"
    name: Literal["clip_cov"] = "clip_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Share of all tokens in the loss that is drawn."""
    low_cov: float = 1.0
    """Tokens with a covariance up to this are not drawn."""
    high_cov: float = 5.0
    """Tokens with a covariance from this on are not drawn."""
    low: float = Field(1.0, ge=0)
    """The ratio is clipped below at 1 - low; 1 hardly clips."""
    high: float = Field(1.0, ge=0)
    """The ratio is clipped above at 1 + high."""

    @model_validator(mode="after")
    def _check_covariance_range(self) -> CovarianceClip:
        if self.low_cov >= self.high_cov:
            raise ValueError(f"no covariance is above low_cov {self.low_cov} and below high_cov {self.high_cov}")
        return self


class CovarianceKl(Clip):
    """No clip, but a penalty on moving the tokens with the highest covariance of advantage and log-prob."""

    formula: ClassVar[str] = "-A r, + coef |l| at the max(1, int(share*tokens)) tokens of highest covariance"
    paper: ClassVar[str] = "KL-Cov (2505.22617)"
    scope: ClassVar[Scope] = "batch"
    name: Literal["kl_cov"] = "kl_cov"
    share: float = Field(2e-3, gt=0, le=1)
    """Share of all tokens in the loss that is penalised."""
    coef: float = Field(1.0, gt=0)
    """Weight of the penalty."""


class TotalVariationClip(Clip):
    """Tokens whose probability moved too far have weight 0; the others have the ratio as a constant weight."""

    formula: ClassVar[str] = (
        "w = sg(min(r, cap)), 0 unless p - p_old <= high (A>0) or >= -low (else); symmetric: 0 unless -low <= p - p_old <= high"
    )
    paper: ClassVar[str] = "DPPO, binary total variation (2602.04879)"
    losses: ClassVar[tuple[str, ...]] = ("sg_logprob",)
    name: Literal["dppo_tv"] = "dppo_tv"
    low: float = Field(0.2, ge=0)
    """Largest fall of the probability for A <= 0."""
    high: float = Field(0.2, ge=0)
    """Largest rise of the probability for A > 0."""
    cap: float = Field(20.0, ge=1)
    """The weight is at most this."""
    symmetric: bool = False
    """Both bounds hold whatever the sign of A (prime-rl's `ipo`, with 0.1 for both)."""


class BinaryKlClip(Clip):
    """Like dppo_tv, with the binary KL divergence (the sampled token against all others) as the distance."""

    formula: ClassVar[str] = (
        "w = sg(min(r, cap)), 0 unless KL <= high or p <= p_old (A>0), KL <= low or p >= p_old (else)"
    )
    paper: ClassVar[str] = "DPPO, binary KL (2602.04879)"
    losses: ClassVar[tuple[str, ...]] = ("sg_logprob",)
    name: Literal["dppo_kl"] = "dppo_kl"
    low: float = Field(0.05, ge=0)
    """Largest divergence of a token that fell, for A <= 0."""
    high: float = Field(0.05, ge=0)
    """Largest divergence of a token that rose, for A > 0."""
    cap: float = Field(20.0, ge=1)
    """The weight is at most this."""


RATIO_RECORDS: tuple[type[Slot], ...] = (TokenRatio, SequenceRatio, SequenceTokenRatio, SequenceProductRatio, NoRatio)
CLIP_RECORDS: tuple[type[Clip], ...] = (
    PpoClip,
    NoClip,
    LogGeoClip,
    ImportanceWeightClip,
    SoftClip,
    CovarianceClip,
    CovarianceKl,
    TotalVariationClip,
    BinaryKlClip,
    *OFF_POLICY_CLIPS,
)


# --- Loss


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
    """Online mirror descent: pulls a sequence's log-ratio towards advantage / tau, without a value model."""

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
    """Self-play preference optimisation: regresses a sequence's log-ratio on its win rate against the other samples."""

    formula: ClassVar[str] = "L_i = (z_i - eta A_i)^2, z_i = sum_t (logp_t - anchor_t), A_i = P_i - 1/2"
    paper: ClassVar[str] = "SPPO (2405.00675)"
    scope: ClassVar[Literal["sequence"]] = "sequence"
    advantages: ClassVar[tuple[str, ...]] = ("win_rate", "softmean")
    level: ClassVar[Literal["sequence"]] = "sequence"
    anchored: ClassVar[bool] = True
    name: Literal["sppo_sq"] = "sppo_sq"
    eta: float = Field(1.0, gt=0)
    """Step size of an iteration; the paper uses about 1000."""


class DroLoss(LossRecord):
    """Plain policy gradient with a quadratic penalty that keeps each token near the policy that sampled."""

    formula: ClassVar[str] = "L_t = -A_t logp_t + beta/2 (logp_t - old_t)^2"
    paper: ClassVar[str] = "Offline regularised RL (2405.19107), token by token"
    name: Literal["dro"] = "dro"
    beta: float = Field(0.1, ge=0)
    """Weight of the penalty."""


class BceLoss(LossRecord):
    """Classifies answers as right or wrong by how much likelier they became, relative to their group."""

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
    """Subtract the mean of the other samples, or the group's mean and divide by its deviation, or nothing."""
    class_weights: bool = True
    """Give right and wrong answers of a prompt the same total weight."""
    per_token: bool = False
    """Score by the mean log-prob of an answer instead of its summed log-ratio."""


class MixedLoss(LossRecord):
    """Trains on samples with their ratio, and on demonstrations in the same group with a weight that depends on the policy's probability."""

    formula: ClassVar[str] = (
        "L_t = -A_t r_t; on demonstrations -A_t (1 - sg(p))^focus w, p = exp(logp_t), w = p/(p + gamma) (shaped), p/q (author) or "
        "2p/(p_old + (p_old + 1)/2) (mixture)"
    )
    paper: ClassVar[str] = "LUFFY (2504.14945); mixture and focus: RL-PLUS (2508.00222)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "demonstrations")
    name: Literal["mixed_offpolicy"] = "mixed_offpolicy"
    weight: Literal["shaped", "author", "mixture"] = "shaped"
    """Weight of a demonstrated token. shaped: p / (p + gamma). author: p over the author's probability, which rows give as `logp`.
    mixture: p over the mean of the old policy's probability and an estimate of the author's.
    """
    gamma: float = Field(0.1, gt=0)
    """With weight shaped: the probability at which a demonstrated token's gradient is largest."""
    focus: float = Field(0.0, ge=0)
    """Exponent of (1 - p), which reduces the weight of demonstrated tokens as they become likely; RL-PLUS uses 0.5."""
    clip: float | None = Field(None, gt=0, lt=1)
    """PPO's clip of the policy's own tokens to 1 - clip .. 1 + clip; null does not clip, as in LUFFY's code."""

    @model_validator(mode="after")
    def _check_gamma_is_used(self) -> MixedLoss:
        if self.weight != "shaped" and self.gamma != MixedLoss.model_fields["gamma"].default:
            raise ValueError(f"gamma belongs to weight shaped: with weight {self.weight} it does nothing")
        return self


class ImitationLoss(LossRecord):
    """Imitates every token in the loss, whatever its reward; filter positives_only limits it to answers with a positive reward, non_stub to real answers."""

    formula: ClassVar[str] = "L_t = -logp_t"
    paper: ClassVar[str] = "temperature: simple self-distillation (2604.01193)"
    advantages: ClassVar[tuple[str, ...]] = ("none",)
    rollout_options: ClassVar[tuple[str, ...]] = ("temperature",)
    name: Literal["nll"] = "nll"
    temperature: float | None = Field(None, gt=0)
    """Temperature of the log-probs in the loss; null is rollout.temperature. 1 trains the plain distribution on samples of a sharpened or
    truncated one (SSD)."""


class PairLoss(LossRecord):
    """A loss on a chosen and a rejected answer to each prompt."""

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
    """Share of preferences taken to be wrong."""
    average: bool = False
    """Average each answer's log-ratio over its tokens, so that length does not decide (Tulu 3); beta is then about 5."""


class IpoLoss(PairLoss):
    """A bounded DPO: the chosen answer should be ahead by 1 / (2 beta), not by as much as possible."""

    formula: ClassVar[str] = "L = (h - 1/(2 beta))^2, h as in dpo"
    paper: ClassVar[str] = "IPO (2310.12036)"
    needs: ClassVar[tuple[str, ...]] = ("groups", "reference")
    name: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0)
    """A smaller beta asks for a larger lead."""
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
    """Weight of the odds term relative to the imitation."""


class KtoLoss(LossRecord):
    """Learns from answers labelled good or bad, without pairs; each is compared with z0, the policy's distance from the reference."""

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
    """Weight of good answers. The paper suggests desirable x number of good answers = 1 to 4/3 of undesirable x number of bad answers."""
    undesirable: float = Field(1.0, ge=0)
    """Weight of bad answers."""


PREFERENCE_LOSS_RECORDS: tuple[type[Slot], ...] = (DpoLoss, IpoLoss, SimpoLoss, OrpoLoss, KtoLoss)
"""The losses of `burnish prefer`."""
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
    *DISTILLATION_LOSSES,
    *OFF_POLICY_LOSSES,
    *PREFERENCE_LOSS_RECORDS,
)


# --- Compatibility

SCOPES: tuple[Scope, ...] = get_args(Scope)


def scope_of(ratio: Slot, clip: Slot, loss: Slot) -> Scope:
    """The widest scope of the three; the option `drift` of the PPO clip needs whole sequences."""
    drift = isinstance(clip, PpoClip) and clip.drift is not None
    scopes: list[Scope] = [ratio.scope, clip.scope, loss.scope, "sequence" if drift else "token"]
    return max(scopes, key=SCOPES.index)


def policy_loss_conflict(ratio: Slot, clip: Clip, loss: Slot) -> str | None:
    """Why these three do not make a loss, and what to set; None if they do."""
    names = {key: slot.name for key, slot in (("ratio", ratio), ("clip", clip), ("loss", loss))}
    bare = "set algorithm.ratio=none and algorithm.clip=none"
    if names["loss"] not in ("surrogate", "sg_logprob"):
        if names["ratio"] == names["clip"] == "none":
            return None
        if isinstance(loss, Plugin):
            return f"a plug-in loss computes its own ratio and clip: {bare}"
        return f"loss {names['loss']} uses no ratio: {bare}"
    if names["ratio"] == "none":
        return (
            f"loss {names['loss']} is ratio times advantage, but ratio is none: "
            "set algorithm.ratio=token or algorithm.loss=logprob"
        )
    if names["loss"] not in clip.losses:
        others = ", ".join(c.model_fields["name"].default for c in CLIP_RECORDS if names["loss"] in c.losses)
        return (
            f"clip {names['clip']} makes loss {' or '.join(clip.losses)}, not {names['loss']}: "
            f"set algorithm.loss={clip.losses[0]}, or algorithm.clip to one of {others}"
        )
    if names["ratio"] not in clip.ratios:
        return (
            f"clip {names['clip']} bounds ratio {' or '.join(clip.ratios)}, not {names['ratio']}: "
            f"set algorithm.ratio={clip.ratios[0]}"
        )
    return None
