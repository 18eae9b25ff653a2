"""Slot `correction`: records and presets of rollout correction, between the policy that samples and the one that is trained.

`correction: decoupled_token_is` names a row of `CORRECTION_PRESETS`; `{name: decoupled_token_is, threshold: 3}` changes it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from burnish.config.errors import did_you_mean
from burnish.config.records import Slot, choice

Positive = Annotated[float, Field(gt=0)]
Band = tuple[Positive, Positive]
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
DEFAULT_THRESHOLD = 2.0


def parse_band(value: Any) -> Any:
    """verl's `"0.5_2.0"` (lower and upper bound) as two numbers; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    parts = value.split("_")
    return tuple(parts) if len(parts) == 2 else value


Bounds = Annotated[Positive | Band, BeforeValidator(parse_band)]


class NoCorrection(Slot):
    """No correction. The mismatch is still measured, with a bound of 2 in metrics that need one."""

    name: Literal["none"] = "none"

    @property
    def acts(self) -> bool:
        """Whether it changes the loss."""
        return False


class CoupledCorrection(Slot):
    """One importance weight per token, truncated or masked; sequences with a token of extreme ratio are rejected (veto)."""

    formula: ClassVar[str] = (
        "W = exp(clip(u, -20, 20)), u = l, sum_t l or mean_t l, l = old - behaviour; truncate: min(W, C); "
        "mask: W [lower <= W <= C]; 0 in rows with any exp(l) < veto; loss_t *= W_t"
    )
    paper: ClassVar[str] = "TIS: Yao et al. (2025); MIS: Liu et al. (2025); verl PR 3694"
    needs: ClassVar[tuple[str, ...]] = ("old",)
    name: Literal["seed"] = "seed"
    apply: bool = True
    """Multiply the policy loss by the weights; false computes metrics only."""
    threshold: float = Field(DEFAULT_THRESHOLD, gt=0)
    """Upper bound C of a weight. Usual values: token 1.5 to 5, sequence 2 to 10, geometric 1.0002 to 1.001."""
    lower: float | None = Field(None, gt=0)
    """Lower bound, used by mode mask and by metrics; null is 1 / threshold."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weight of each token, of the whole sequence, or the geometric mean of its tokens' weights."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Truncate weights at the threshold (TIS), or reject tokens and sequences out of bounds (MIS)."""
    veto: float | None = Field(1e-4, gt=0)
    """A sequence with any token ratio below this is rejected; null rejects none."""
    target: Literal["weight", "mask"] = "weight"
    """`weight`: a rejected token has weight 0 and still counts in the loss's mean. `mask`: it leaves the mask and the count."""

    @property
    def acts(self) -> bool:
        """Whether it changes the loss."""
        return self.apply

    @model_validator(mode="after")
    def _check_bounds(self) -> CoupledCorrection:
        lower = 1 / self.threshold if self.lower is None else self.lower
        if lower > self.threshold:
            raise ValueError(
                f"correction keeps no weight: the lower bound {lower:g} is above correction.threshold {self.threshold:g}"
            )
        return self


class _WeightsAndRejection(Slot):
    """Importance weights and rejection, each with its own bounds."""

    weights: Literal["token", "sequence"] | None = None
    """Multiply the policy loss by the weight of each token or of the whole sequence; null applies no weights."""
    threshold: Bounds = DEFAULT_THRESHOLD
    """One number C truncates weights at C (TIS). Two numbers, `[0.5, 5.0]`, set weights outside to 0 (IcePop)."""
    batch_normalise: bool = False
    """Divide the weights by their mean, so that on average they do not change the size of the gradient."""
    reject: dict[Rejection, Bounds] = Field(default_factory=dict)
    """Statistics and the bounds within which a token or sequence stays in the loss; all must hold.

    `token_k2`, `seq_mean_k3`, ...: the largest accepted value. `token_k1`, `seq_sum_k1`, `seq_mean_k1`: the accepted ratios
    old/behaviour, as `[0.5, 2.0]`, or one number u for [1/u, u]. (verl bounds the inverse ratio: its `lo_hi` is `[1/hi, 1/lo]` here.)
    """

    @property
    def acts(self) -> bool:
        """Whether it changes the loss."""
        return self.weights is not None or bool(self.reject)

    @field_validator("threshold")
    @classmethod
    def _check_threshold(cls, value: float | Band) -> float | Band:
        low, high = value if isinstance(value, tuple) else (1 / value, value)
        if low > high:
            raise ValueError(f"correction.threshold keeps no weight: the lower bound {low:g} is above {high:g}")
        return value

    @field_validator("reject")
    @classmethod
    def _check_rejection_bounds(cls, value: dict[Rejection, float | Band]) -> dict[Rejection, float | Band]:
        for option, bounds in value.items():
            if isinstance(bounds, tuple) and not option.endswith("k1"):
                raise ValueError(f"{option} is never negative and has one bound, the largest value kept, not {bounds}")
            low, high = bounds if isinstance(bounds, tuple) else (1 / bounds, bounds)
            if option.endswith("k1") and low > high:
                raise ValueError(f"{option} keeps nothing: ratios from {low:g} to {high:g}")
        return value

    @model_validator(mode="after")
    def _check_weight_options_are_used(self) -> _WeightsAndRejection:
        if self.weights is None and (self.threshold != DEFAULT_THRESHOLD or self.batch_normalise):
            raise ValueError(
                "correction.threshold and batch_normalise apply to weights, and there are none: set correction.weights=token or sequence"
            )
        return self


class DecoupledCorrection(_WeightsAndRejection):
    """Corrects the mismatch from engine to trainer by weights, rejection or both; the clip bounds the drift after that."""

    formula: ClassVar[str] = (
        "loss_t *= w, w = min(W, C) or W [lo <= W <= hi], W = exp(clip(l or sum_t l, -20, 20)), l = old - behaviour; "
        "loss_mask &= every rejection's bounds on k1 = -l, k2 = l^2/2, k3 = exp(l) - 1 - l"
    )
    paper: ClassVar[str] = (
        "Decoupled PPO (2110.00641); TIS: Yao et al. (2025); MIS: Liu et al. (2025); IcePop (2510.18855)"
    )
    needs: ClassVar[tuple[str, ...]] = ("old",)
    name: Literal["decoupled"] = "decoupled"


class BypassCorrection(_WeightsAndRejection):
    """Uses the engine's log-probs as the anchor of the ratio, and saves the forward pass for old log-probs."""

    formula: ClassVar[str] = (
        "old := behaviour; ppo_clip: the clip on r = exp(logp - behaviour); reinforce: -sg(w) A logp, w as in decoupled "
        "with l = logp - behaviour; 0 if rejected, denominators unchanged"
    )
    paper: ClassVar[str] = "PPO (1707.06347); TIS: Yao et al. (2025); IcePop (2510.18855)"
    scope: ClassVar[Literal["sequence"]] = "sequence"
    name: Literal["bypass"] = "bypass"
    loss: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """`ppo_clip`: the loss of the algorithm's slots, clipped around the engine's policy. `reinforce`: weighted log-probs without a clip."""

    @property
    def span(self) -> Literal["sequence", "batch"]:
        """The scope these options need: batch_normalise needs the mean weight of the whole mini-batch."""
        return "batch" if self.batch_normalise else "sequence"

    @model_validator(mode="after")
    def _check_mismatch_is_corrected_once(self) -> BypassCorrection:
        if self.loss == "ppo_clip" and self.weights is not None:
            raise ValueError(
                f"correction.weights={self.weights} counts the gap twice: with bypass the ratio in the clip is already the current policy "
                "over the engine's; set correction.weights=null, or correction.loss=reinforce, which has no ratio"
            )
        return self


class BudgetCorrection(Slot):
    """A limit on the mismatch. A controller chooses the mildest correction that keeps to it, step by step."""

    formula: ClassVar[str] = (
        "the mildest of a ladder of corrections that leaves k3_kl and ess within bounds and at least half the tokens"
    )
    needs: ClassVar[tuple[str, ...]] = ("old",)
    name: Literal["budget"] = "budget"
    k3_kl: float | None = Field(None, gt=0)
    """Largest KL from engine to trainer (k3 estimate) that a correction may leave in the tokens trained on; null sets no limit."""
    ess: float | None = Field(None, gt=0, lt=1)
    """Smallest effective sample size of the weights, as a share of the tokens; null sets no limit."""

    @property
    def acts(self) -> bool:
        """Whether it changes the loss."""
        return True

    @model_validator(mode="after")
    def _check_has_limit(self) -> BudgetCorrection:
        if self.k3_kl is None and self.ess is None:
            raise ValueError(
                "correction.budget tolerates anything: set k3_kl (such as 1e-3), ess (such as 0.9) or both"
            )
        return self


CORRECTION_RECORDS: tuple[type[Slot], ...] = (
    NoCorrection,
    CoupledCorrection,
    DecoupledCorrection,
    BypassCorrection,
    BudgetCorrection,
)


# --- Presets

GEOMETRIC_REJECTION = {"seq_mean_k1": (0.999, 1.001)}
K3_REJECTION = {"seq_mean_k3": 0.01}


def _decoupled(weights: str | None = None, **options: Any) -> dict[str, Any]:
    return {"name": "decoupled", "weights": weights, **options}


def _policy_gradient(weights: str | None = None, **options: Any) -> dict[str, Any]:
    return {"name": "bypass", "loss": "reinforce", "weights": weights, **options}


CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "disabled": _decoupled(),
    "decoupled_token_is": _decoupled("token"),
    "decoupled_seq_is": _decoupled("sequence"),
    "decoupled_token_icepop": _decoupled("token", threshold=(0.5, 5.0)),
    "decoupled_seq_is_rs": _decoupled("sequence", reject={"seq_sum_k1": (0.5, 2.0)}),
    "decoupled_geo_rs": _decoupled(reject=GEOMETRIC_REJECTION),
    "decoupled_geo_rs_seq_tis": _decoupled("sequence", reject=GEOMETRIC_REJECTION),
    "decoupled_geo_rs_token_tis": _decoupled("token", reject=GEOMETRIC_REJECTION),
    "decoupled_k3_rs": _decoupled(reject=K3_REJECTION),
    "decoupled_k3_rs_seq_tis": _decoupled("sequence", reject=K3_REJECTION),
    "decoupled_k3_rs_token_tis": _decoupled("token", reject=K3_REJECTION),
    "bypass_ppo_clip": {"name": "bypass"},
    "bypass_ppo_clip_geo_rs": {"name": "bypass", "reject": GEOMETRIC_REJECTION},
    "bypass_ppo_clip_k3_rs": {"name": "bypass", "reject": K3_REJECTION},
    "bypass_pg_is": _policy_gradient("sequence"),
    "bypass_pg_token_icepop": _policy_gradient("token", threshold=(0.5, 5.0)),
    "bypass_pg_geo_rs": _policy_gradient(reject=GEOMETRIC_REJECTION),
    "bypass_pg_geo_rs_seq_tis": _policy_gradient("sequence", reject=GEOMETRIC_REJECTION),
    "bypass_pg_geo_rs_token_tis": _policy_gradient("token", reject=GEOMETRIC_REJECTION),
}
"""Options of each preset; options that are not named have their defaults."""


def expand_preset(value: Any) -> Any:
    """The options that a preset's name stands for. Options given with the name override the preset's."""
    own = {"name": value} if isinstance(value, str) else value
    if not isinstance(own, dict):
        return own
    if isinstance(own.get("budget"), dict):  # `{budget: {ess: 0.9}}` is `{name: budget, ess: 0.9}`
        own = {"name": "budget", **own["budget"]}
    name = own.get("name")
    if name in CORRECTION_PRESETS:
        return {**CORRECTION_PRESETS[name], **{k: v for k, v in own.items() if k != "name"}}
    records = [r.model_fields["name"].default for r in CORRECTION_RECORDS]
    if isinstance(name, str) and name not in records:
        known = [*records, *CORRECTION_PRESETS]
        raise ValueError(f"unknown correction {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
    return own


CorrectionSlot: Any = Annotated[choice(*CORRECTION_RECORDS, plugin=False), BeforeValidator(expand_preset)]


def parse_verl_rejections(options: str, thresholds: str | float) -> dict[str, Any]:
    """`reject` from verl's two keys: names joined by commas, and one threshold for each or one for all."""
    names = [name.strip() for name in options.split(",")]
    bounds = [text.strip() for text in str(thresholds).split(",")]
    if len(bounds) not in (1, len(names)):
        raise ValueError(
            f"{len(names)} rejections ({options}) take one threshold each or one for all, not {len(bounds)} ({thresholds})"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"rejection {twice[0]} is given twice")
    return dict(zip(names, bounds * len(names) if len(bounds) == 1 else bounds, strict=True))
