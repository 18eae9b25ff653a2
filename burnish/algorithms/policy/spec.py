"""Slots `ratio` and `clip`, and the losses that are made of them or of log-probs alone."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from pydantic import Field, model_validator

from burnish.config.records import Plugin, Slot

Scope = Literal["token", "sequence", "group", "batch"]

# --- Ratio


class TokenRatio(Slot):
    """One importance ratio per token."""

    formula: ClassVar[str] = "r_t = exp(clamp(logp_t - old_t, -20, 20))"
    paper: ClassVar[str] = "PPO (1707.06347)"
    name: Literal["token"] = "token"


class SequenceRatio(Slot):
    """One ratio per sequence, the geometric mean of its tokens' ratios."""

    formula: ClassVar[str] = "s_i = exp(min(mean_t (logp_t - old_t), 10)), the gradient through the mean"
    paper: ClassVar[str] = "GSPO (2507.18071)"
    scope: ClassVar[Scope] = "sequence"
    name: Literal["sequence"] = "sequence"


class SequenceTokenRatio(Slot):
    """The sequence's ratio as value, each token's own gradient: for advantages that differ inside a sequence."""

    formula: ClassVar[str] = "s_it = sg(s_i) exp(logp_it - sg(logp_it))"
    paper: ClassVar[str] = "GSPO-token (2507.18071)"
    scope: ClassVar[Scope] = "sequence"
    name: Literal["seq_token"] = "seq_token"


class SequenceProductRatio(Slot):
    """The ratio of whole sequences, without length normalisation."""

    formula: ClassVar[str] = "exp(min(sum_t (logp_t - old_t), 10))"
    scope: ClassVar[Scope] = "sequence"
    name: Literal["seq_prod"] = "seq_prod"


class NoRatio(Slot):
    """No importance ratio: the loss uses log-probs directly."""

    name: Literal["none"] = "none"


# --- Clip


class Clip(Slot):
    """What bounds the ratio."""

    losses: ClassVar[tuple[str, ...]] = ("surrogate",)
    """The losses it makes."""
    ratios: ClassVar[tuple[str, ...]] = ("token",)
    """The ratios it bounds."""
    level: ClassVar[Literal["token", "sequence"]] = "token"
    """Whether what it makes is one number a token or one a sequence."""


class PpoClip(Clip):
    """PPO's pessimistic clip, optionally asymmetric (clip-higher), dual, and without sequences that drifted away."""

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
    """Upper bound on the loss of negative advantages, as a ratio; null leaves it unbounded."""
    drift: float | None = Field(None, ge=0)
    """Negative advantages leave the loss in sequences whose mean of old - logp is above this; null keeps them."""


class NoClip(Clip):
    """The ratio as it is."""

    formula: ClassVar[str] = "-A r"
    ratios: ClassVar[tuple[str, ...]] = ("token", "sequence", "seq_token", "seq_prod")
    name: Literal["none"] = "none"


class LogGeoClip(Clip):
    """Log-ratios clipped token by token, then averaged over the sequence."""

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
    """The weight is at least 1 - low; null leaves it free."""
    cap: float = Field(1.2, ge=1)
    """The weight is at most this."""


class SoftClip(Clip):
    """A smooth gate instead of an edge, steeper for negative advantages."""

    formula: ClassVar[str] = "-A sigmoid(tau (r-1)) 4/tau, tau = tau_positive if A>0 else tau_negative"
    paper: ClassVar[str] = "SAPO (2511.20347)"
    name: Literal["soft"] = "soft"
    tau_positive: float = Field(1.0, gt=0)
    """How fast tokens with A > 0 lose their gradient away from r = 1."""
    tau_negative: float = Field(1.05, gt=0)
    """The same for tokens with A <= 0."""


class CovarianceClip(Clip):
    """PPO's clip, and no gradient at a few tokens drawn from those with high covariance of advantage and log-prob."""

    formula: ClassVar[str] = (
        "0 at max(1, int(share*tokens)) tokens drawn where low_cov < (A - mean A)(logp - mean logp) < high_cov, else PPO"
    )
    paper: ClassVar[str] = "Clip-Cov (2505.22617)"
    scope: ClassVar[Scope] = "batch"
    name: Literal["clip_cov"] = "clip_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """How many are drawn, as a share of all tokens in the loss."""
    low_cov: float = 1.0
    """Tokens up to this covariance are not drawn."""
    high_cov: float = 5.0
    """Nor are those from this one on."""
    low: float = Field(1.0, ge=0)
    """The ratio is clipped below at 1 - low; 1 is next to no clip."""
    high: float = Field(1.0, ge=0)
    """The ratio is clipped above at 1 + high."""

    @model_validator(mode="after")
    def _band(self) -> CovarianceClip:
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
    """How many are penalised, as a share of all tokens in the loss."""
    coef: float = Field(1.0, gt=0)
    """Weight of the penalty."""


class TotalVariationClip(Clip):
    """Tokens whose probability has moved too far leave the loss; the ratio is a constant weight of the others."""

    formula: ClassVar[str] = "w = sg(min(r, cap)), 0 unless p - p_old <= high (A>0) or >= -low (else)"
    paper: ClassVar[str] = "DPPO, binary total variation (2602.04879)"
    losses: ClassVar[tuple[str, ...]] = ("sg_logprob",)
    name: Literal["dppo_tv"] = "dppo_tv"
    low: float = Field(0.2, ge=0)
    """The most a probability may have fallen where A <= 0."""
    high: float = Field(0.2, ge=0)
    """The most a probability may have risen where A > 0."""
    cap: float = Field(20.0, ge=1)
    """The weight is at most this."""


class BinaryKlClip(Clip):
    """As dppo_tv, with the KL divergence of sampled token against all others as the distance."""

    formula: ClassVar[str] = (
        "w = sg(min(r, cap)), 0 unless KL <= high or p <= p_old (A>0), KL <= low or p >= p_old (else)"
    )
    paper: ClassVar[str] = "DPPO, binary KL (2602.04879)"
    losses: ClassVar[tuple[str, ...]] = ("sg_logprob",)
    name: Literal["dppo_kl"] = "dppo_kl"
    low: float = Field(0.05, ge=0)
    """The largest divergence of a token that fell where A <= 0."""
    high: float = Field(0.05, ge=0)
    """The largest divergence of a token that rose where A > 0."""
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
)


# --- Compatibility

SCOPES: tuple[Scope, ...] = get_args(Scope)


def scope_of(ratio: Slot, clip: Slot, loss: Slot) -> Scope:
    """The widest scope of the three; a limit on drift is one on whole sequences."""
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
            return f"a loss of your own makes its ratio and clip itself: {bare}"
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
