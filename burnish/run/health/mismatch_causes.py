"""Causes of a log-prob gap between sampling engine and trainer, as a table of rules over measured symptoms.

A cause is recognised by three things: the metrics of `burnish.algorithms.correction.mismatch_diagnostics` over the last steps
that were out of range, the history of the gap (`GapHistory`), and the configuration (`HealthContext`). If two causes have
the same symptoms, the message names both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

RISE_FACTOR = 4.0
"""A gap has risen if it is this many times the gap measured while engine and trainer had the same weights."""
ROUNDING_SHARE = 1e-5
"""Shares below this are rounding and count as equal."""
GROWTH_FACTOR = 1.5
"""A gap grows if it is this many times its first risen value. A gap that does not grow varies by a fifth between steps."""
ONE_SIDED_BALANCE = -0.8
"""A balance below this is not noise."""


@dataclass(frozen=True)
class HealthContext:
    """The settings that a diagnosis needs; None means unknown."""

    top_p: float | None = None
    top_k: int | None = None
    temperature: float | None = None
    engine: str = "engine"
    engine_dtype: str | None = None
    learner_dtype: str | None = None
    selection: str = "none"
    """How filters select training samples: `none` do; `unlikely` samples are preferred; `any` kind may be preferred."""


@dataclass
class GapHistory:
    """How the gap developed since the first step whose tokens were sampled with the trainer's own weights."""

    start: float | None = None
    """The share at that first step."""
    num_still: int = 0
    """Number of later steps before the gap rose."""
    onset: float | None = None
    """The share when the gap rose."""
    last: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    def add(self, share: float, lag: float) -> None:
        """Add a step: its share, and the mean age of its tokens in updates."""
        self.last.append(share)
        if self.start is None:
            self.start = share if lag == 0 else None
        elif share <= RISE_FACTOR * max(self.start, ROUNDING_SHARE):
            self.num_still, self.onset = self.num_still + 1, None
        elif self.onset is None:
            self.onset = share

    @property
    def now(self) -> float:
        return median(self.last)

    @property
    def has_risen(self) -> bool:
        return self.start is not None and self.now > RISE_FACTOR * max(self.start, ROUNDING_SHARE)

    @property
    def follows_updates(self) -> bool:
        """Whether the gap rose with the first update, or keeps growing with every update."""
        return self.has_risen and (
            self.num_still == 0 or (self.onset is not None and self.now > GROWTH_FACTOR * self.onset)
        )


@dataclass(frozen=True)
class Symptoms:
    """The evidence from which a cause is recognised."""

    steps: Sequence[Mapping[str, float]]
    """Metrics of the last steps that were out of range."""
    history: GapHistory
    context: HealthContext

    def __getitem__(self, name: str) -> float:
        """The median of a metric; nan if it was not measured, so that every comparison is False."""
        found = [m[f"mismatch/{name}"] for m in self.steps if f"mismatch/{name}" in m]
        return median(found) if found else math.nan

    @property
    def is_fresh(self) -> bool:
        """Whether most tokens were sampled with the trainer's weights, or the engine does not tell."""
        return not self["lag_mean"] >= 0.5

    @property
    def grows_with_age(self) -> bool:
        """Whether older tokens have larger gaps."""
        return self["lag_corr"] > 0.15


@dataclass(frozen=True)
class MismatchCause:
    """One likely cause: the condition that recognises it, and its message."""

    name: str
    holds: Callable[[Symptoms], bool]
    cause: Callable[[Symptoms], str]
    remedy: str


def _weights_never_arrived(s: Symptoms) -> bool:
    return s.is_fresh and s.history.follows_updates and not s.grows_with_age


def _wrong_temperature(s: Symptoms) -> bool:
    """One factor explains the gap, the likeliest token leans the same way at every position, and no tail is missing."""
    one_way = s["sure_lean"] * math.copysign(1, s["heat"]) > 0.9
    return abs(s["heat_fit"]) > 0.8 and -4 < s["heat"] < 0.8 and one_way and s["balance"] > ONE_SIDED_BALANCE - 0.1


def _truncated(s: Symptoms) -> bool:
    return s["balance"] < ONE_SIDED_BALANCE


def _not_drawn_as_reported(s: Symptoms) -> bool:
    """Tokens are less or more surprising than the trainer's entropy, beyond what the gap explains."""
    return abs(s["surprise"]) > 0


def _reencoded(s: Symptoms) -> bool:
    """A row agrees until one token is far off; the tokens behind it, if any, have large gaps too."""
    return s["far_share"] > 0 and s["share_before"] < 0.05 and not s["share_behind"] < 5 * s["share_before"]


def _stale(s: Symptoms) -> bool:
    """Tokens are old, and the gap came with their age or grows with it."""
    return s.grows_with_age or (not s.is_fresh and (s.history.start is None or s.history.has_risen))


def _largest_near_prompt(s: Symptoms) -> bool:
    """The gap is largest next to the prompt."""
    return s["first_share"] > 2.5 * s["late_share"] > 0 and s["first_share"] > 0.01


def _say_temperature(s: Symptoms) -> str:
    factor = 1 / (1 - s["heat"])
    way = "hotter" if factor > 1 else "colder"
    said = "" if s.context.temperature is None else f" (temperature={s.context.temperature:g} is set)"
    return (
        f"a wrong temperature{said}: the engine's log-probs are of a {way} policy than the trainer's, at about {factor:.2g} "
        "times its temperature"
    )


def _truncation_settings(context: HealthContext) -> str:
    said = [f"top_p={context.top_p:g}"] if context.top_p is not None and context.top_p < 1 else []
    said += [f"top_k={context.top_k}"] if context.top_k else []
    return f" ({', '.join(said)} is set)" if said else ", by a default of its own"


def _say_truncated(s: Symptoms) -> str:
    return f"top-p or top-k is on{_truncation_settings(s.context)}: the engine is surer than the trainer everywhere"


def _say_not_as_reported(s: Symptoms) -> str:
    excess = s["surprise_excess"]
    if excess < 0:
        what = f"top-p or top-k is on{_truncation_settings(s.context)}, or tokens are drawn colder than asked for"
        seen = f"tokens are {-excess:.0%} less surprising than the trainer's entropy"
    else:
        what = "a wrong temperature: tokens are drawn hotter than asked for, or not from what is reported"
        seen = f"tokens are {excess:.0%} more surprising than the trainer's entropy"
    return f"{what}: {seen}, though the log-probs reported agree with the trainer's"


def _say_reencoded(s: Symptoms) -> str:
    return (
        f"a server that re-encodes text: {s['far_share']:.2%} of tokens are more than 20 times off, while the tokens before "
        f"them agree (half of all to {s['gap_median']:.1g})"
    )


def _say_stale(s: Symptoms) -> str:
    if s.grows_with_age:
        return f"stale weights: the gap grows by {s['lag_slope']:.2g} with every update a token is old (mean {s['lag_mean']:.2g})"
    return f"stale weights: tokens are {s['lag_mean']:.2g} updates old"


def _say_never_arrived(s: Symptoms) -> str:
    return (
        f"weights never arrived, or arrive late: the two policies were {s.history.start:.1g} apart at the first step and are "
        f"{s.history.now:.2g} apart now, although the {s.context.engine} says its version is fresh"
    )


def _say_precision(s: Symptoms) -> str:
    e, t = s.context.engine_dtype, s.context.learner_dtype
    if e and t and e != t:
        what = f"precision of the engine ({e} against the trainer's {t})"
    else:
        what = f"precision of the engine (rounded weights, other arithmetic), or {CHANGED_PROMPT}"
    return f"{what}: a gap without a direction or a trend"


CHANGED_PROMPT = "an added BOS token or a prompt encoded otherwise"
SAMPLING_REMEDY = (
    "set rollout.top_p=1 and rollout.top_k=0, and see that the server's generation defaults do not set them"
)
PROMPT_REMEDY = "send token ids, not text, and turn off the server's add_special_tokens"
MISMATCH_CAUSES: tuple[MismatchCause, ...] = (
    # First, because a gap that grows with the updates can look like any other: a policy that gets surer looks colder.
    MismatchCause(
        "weights never arrived",
        _weights_never_arrived,
        _say_never_arrived,
        "check that the engine loads what it is sent: names, adapters, a cache of prefixes kept across updates",
    ),
    MismatchCause(
        "wrong temperature",
        _wrong_temperature,
        _say_temperature,
        "give engine and trainer the same rollout.temperature, and see that the server reports log-probs after it",
    ),
    MismatchCause("truncated sampling", _truncated, _say_truncated, SAMPLING_REMEDY),
    MismatchCause(
        "re-encoding",
        _reencoded,
        _say_reencoded,
        "take token ids from the engine, not text, and look at the worst tokens in the samples",
    ),
    MismatchCause(
        "unlike its report",
        _not_drawn_as_reported,
        _say_not_as_reported,
        f"{SAMPLING_REMEDY}; compare the temperature it draws with",
    ),
    MismatchCause(
        "stale weights",
        _stale,
        _say_stale,
        "allow less staleness, update the engine more often, or lower the learning rate",
    ),
    MismatchCause(
        "another prompt",
        _largest_near_prompt,
        lambda s: (
            f"{CHANGED_PROMPT}: the gap is {s['first_share'] / s['late_share']:.2g} times larger at the first token written than late "
            "in a row"
        ),
        PROMPT_REMEDY,
    ),
    # Rounded weights and a changed prompt look the same: a steady gap from the first step to the last.
    MismatchCause(
        "a steady gap",
        lambda s: s["far_share"] > 0.01,
        lambda s: (
            f"{CHANGED_PROMPT}, or weights that are another model's: a gap without a trend, too large for rounding"
        ),
        f"{PROMPT_REMEDY}; check the model the engine serves, and that it loads what it is sent",
    ),
    MismatchCause(
        "a steady gap",
        lambda s: s["share"] >= 0,
        _say_precision,
        f"run the engine in the trainer's dtype (float16 or float32 for both if need be); {PROMPT_REMEDY}; or correct it: "
        "correction=decoupled_token_is",
    ),
    MismatchCause(
        "unknown",
        lambda s: True,
        lambda s: "not known, for the symptoms were not measured",
        "look at the worst tokens in the samples",
    ),
)
"""The first cause whose condition holds is reported, so the most specific come first. Entries with one name are one cause."""


def diagnose(symptoms: Symptoms) -> MismatchCause:
    """Return the first cause whose condition holds."""
    return next(cause for cause in MISMATCH_CAUSES if cause.holds(symptoms))
