"""The slots of an algorithm as records: name, options, what each needs, its formula and its paper.

`burnish.algorithms` holds the function of every record, under the same slot and name; a test compares the two.
A record's options are its fields, so an option that belongs to another choice is an unknown key, not a silent no-op.
Any slot with a function also takes a user's own: `advantage: {name: path/to/file.py:function, options: {...}}`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from burnish.config.plugins import is_plugin


class Record(BaseModel):
    """A frozen piece of configuration whose unknown keys are errors and whose field docstrings are its help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Slot(Record):
    """One choice for one slot."""

    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """What the rest of the system must provide: `groups`, several samples of each prompt."""


class Plugin(Slot):
    """A user's own function for a slot."""

    name: str
    """`path/to/file.py:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""


# --- advantages ------------------------------------------------------------------------------------------------------


class GrpoAdvantage(Slot):
    """Reward relative to its group, optionally divided by a standard deviation."""

    formula: ClassVar[str] = (
        "A_i = (r_i - mean_g) / (std_g + eps), the same on every token; a constant group gives exactly 0"
    )
    paper: ClassVar[str] = "DeepSeekMath (2402.03300); std: none is Dr.GRPO (2503.20783)"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    name: Literal["grpo"] = "grpo"
    std: Literal["group", "none", "batch"] = "group"
    """Divide by the group's sample deviation, by nothing (Dr.GRPO), or by that of all rewards in the batch."""
    eps: float = Field(1e-6, ge=0)
    """Added to the deviation before dividing."""
    singleton: Literal["raw", "zero"] = "raw"
    """The advantage of a group of one: its raw reward, or zero."""


class ReinforceAdvantage(Slot):
    """Discounted return-to-go minus a constant."""

    formula: ClassVar[str] = "A_it = sum_{s>=t} gamma^(s-t) r_is - baseline, over the tokens the model wrote"
    paper: ClassVar[str] = "Williams (1992)"
    name: Literal["reinforce"] = "reinforce"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per written token."""
    baseline: float = 0.0
    """A constant taken off every return."""


# --- ratio, clip, loss -----------------------------------------------------------------------------------------------


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


# --- aggregation, KL, entropy, filters ---------------------------------------------------------------------------------


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


class ZeroSignalFilter(Slot):
    """Drops groups whose rewards are all equal: they have no gradient, and would only dilute the mean."""

    formula: ClassVar[str] = "keep group g iff max_g r > min_g r or its size is 1"
    paper: ClassVar[str] = "DAPO (2503.14476), without its refill"
    needs: ClassVar[tuple[str, ...]] = ("groups",)
    name: Literal["zero_signal"] = "zero_signal"


class OverlongFilter(Slot):
    """Takes truncated samples out of the loss; they still count in their group's statistics."""

    formula: ClassVar[str] = "loss_mask of a truncated sequence := 0, after advantages"
    paper: ClassVar[str] = "DAPO (2503.14476)"
    name: Literal["overlong"] = "overlong"


def _tagged(value: Any) -> Any:
    """`grpo` is short for `{name: grpo}`."""
    return {"name": value} if isinstance(value, str) else value


def _tag(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return "plugin" if isinstance(name, str) and is_plugin(name) else name


def _slot(*records: type[Slot], plugin: bool = True) -> Any:
    options: list[Any] = [Annotated[r, Tag(r.model_fields["name"].default)] for r in records]
    if plugin:
        options.append(Annotated[Plugin, Tag("plugin")])
    union: Any = options[0]
    for option in options[1:]:
        union = union | option
    return Annotated[union, Discriminator(_tag), BeforeValidator(_tagged)]


ADVANTAGES: tuple[type[Slot], ...] = (GrpoAdvantage, ReinforceAdvantage)
RATIOS: tuple[type[Slot], ...] = (TokenRatio, NoRatio)
CLIPS: tuple[type[Slot], ...] = (PpoClip, NoClip)
LOSSES: tuple[type[Slot], ...] = (SurrogateLoss, LogprobLoss)
FILTERS: tuple[type[Slot], ...] = (ZeroSignalFilter, OverlongFilter)
TABLE = {"advantage": ADVANTAGES, "ratio": RATIOS, "clip": CLIPS, "loss": LOSSES, "filters": FILTERS}

AdvantageSlot = _slot(*ADVANTAGES)
RatioSlot = _slot(*RATIOS, plugin=False)
ClipSlot = _slot(*CLIPS, plugin=False)
LossSlot = _slot(*LOSSES)
FilterSlot = _slot(*FILTERS)
AggregationSlot = Annotated[Aggregation, BeforeValidator(_tagged)]
