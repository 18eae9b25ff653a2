"""A health check that speaks: one line when a number leaves its healthy range, with the likely cause and what to try.

Rules are data. `Health.check` is called once a step with the step's metrics (those of rollout correction and of
`burnish.algorithms.correction.symptoms` among them) and the facts of the configuration. It is quiet while all is well, and says
each cause once an episode: from the first number that has been out of its range long enough until all of that kind
have been back for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low

BACK = 3
"""Healthy steps that end an episode: a number that swings around the end of its range is one episode."""
MEMORY = 6
"""Steps over which a gap is watched for growth, of which there must be four."""
GROWTH = 1.05
"""A gap grows where half of the last steps multiply it by this at least: a jump does so once, and noise goes both ways."""


@dataclass(frozen=True)
class Facts:
    """What the configuration says, and a diagnosis may point at; None is not known."""

    top_p: float | None = None
    top_k: int | None = None
    temperature: float | None = None
    engine: str = "engine"
    engine_dtype: str | None = None
    learner_dtype: str | None = None


@dataclass(frozen=True)
class Rule:
    """A number and where it is while all is well."""

    metrics: tuple[str, ...]
    """Its names: the first that a step has is read."""
    low: float
    high: float
    patience: int
    """Steps in a row it must be out of range."""
    cause: str = ""
    """The likely cause; empty where `diagnose` tells it from the other metrics."""
    remedy: str = ""


def _both(name: str, second: str = "") -> tuple[str, ...]:
    """A number's names in the first and the second form of rollout correction."""
    return f"mismatch/{name}", f"rollout_corr/{second or name}"


RULES: tuple[Rule, ...] = (
    # A row with such a token is wrong as a whole, so that few are many; sizes of noise are seen at once.
    Rule(_both("rollout_is_catastrophic_token_fraction"), 0.0, 0.01, 2),
    Rule(_both("rollout_is_veto_fraction"), 0.0, 0.05, 2),
    Rule(_both("rollout_is_eff_sample_size"), 0.8, 1.0, 2),
    Rule(_both("rollout_is_mean"), 0.5, 2.0, 2),
    Rule(_both("rollout_is_std"), 0.0, 0.5, 2),
    Rule(_both("mismatch_kl", "kl"), -0.1, 0.1, 2),
    # bfloat16 against bfloat16 is at 1e-4 to 1e-3; beyond, a token's probability is typically 4% off.
    Rule(_both("mismatch_k3_kl", "k3_kl"), 0.0, 1e-3, 2),
    # Too few to move a mean, too many to be noise: log-probs that differ 20 times.
    Rule(("mismatch/far_share",), 0.0, 1e-3, 2),
    # A percent off, always the same way, hides below the bounds above and biases every gradient.
    Rule(("mismatch/one_sided",), 0.0, 2e-3, 3),
    Rule(
        ("rollout/truncated",),
        0.0,
        0.5,
        3,
        "most answers are cut at their length limit, so that the reward judges unfinished text",
        "raise rollout.max_tokens, or see that the chat template's end token stops generation",
    ),
)


def derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with `mismatch/one_sided`: the mean gap where the engine is surer everywhere, else 0."""
    is_one_sided = metrics.get("mismatch/balance", 0.0) < ONE_SIDED
    return {**metrics, "mismatch/one_sided": metrics.get("mismatch/gap_rest", 0.0) if is_one_sided else 0.0}


# --- causes of a gap between engine and trainer ------------------------------------------------------------------------

ONE_SIDED = -0.8
"""A balance below this is no noise; see `symptoms`."""


@dataclass(frozen=True)
class Signs:
    """What causes are told apart by: this step's metrics, the typical gaps of the last steps (newest last), and the facts."""

    metrics: Mapping[str, float]
    gaps: Sequence[float]
    facts: Facts

    def __getitem__(self, name: str) -> float:
        """A symptom, nan where it was not measured: no comparison with it holds."""
        return self.metrics.get(f"mismatch/{name}", math.nan)

    @property
    def is_growing(self) -> bool:
        """Whether the gap is on its way up, not only up."""
        steps = [b / max(a, 1e-12) for a, b in pairwise(self.gaps)]
        return len(steps) >= 3 and median_low(steps) > GROWTH and self.gaps[-1] > 1.3 * self.gaps[0]


@dataclass(frozen=True)
class Cause:
    """One likely cause: how to recognise it, and what to say."""

    name: str
    holds: Callable[[Signs], bool]
    cause: Callable[[Signs], str]
    remedy: str


def _truncated(s: Signs) -> str:
    f = s.facts
    said = [f"top_p={f.top_p:g}"] if f.top_p is not None and f.top_p < 1 else []
    said += [f"top_k={f.top_k}"] if f.top_k else []
    where = f" ({', '.join(said)} is set)" if said else ", by a default of its own"
    return f"top-p or top-k is on{where}: the engine is surer than the trainer everywhere"


def _temperature(s: Signs) -> str:
    way = "hotter" if s["surprise_corr"] > 0 else "colder"
    said = "" if s.facts.temperature is None else f" (temperature={s.facts.temperature:g} is set)"
    return f"a wrong temperature{said}: the engine's log-probs are of a {way} policy than the trainer's"


def _precision(s: Signs) -> str:
    e, t = s.facts.engine_dtype, s.facts.learner_dtype
    said = f" ({e} against the trainer's {t})" if e and t and e != t else ""
    return f"precision of the engine{said}: a symmetric gap without a trend"


CAUSES: tuple[Cause, ...] = (
    Cause(
        "truncated sampling",
        lambda s: s["balance"] < ONE_SIDED,
        _truncated,
        "set rollout.top_p=1 and rollout.top_k=0, and see that the server's generation defaults do not set them",
    ),
    Cause(
        "stale weights",
        lambda s: s["lag_corr"] > 0.15,
        lambda s: (
            f"stale weights: the gap grows by {s['lag_slope']:.2g} with every update a token is old (mean {s['lag_mean']:.2g})"
        ),
        "allow less staleness, update the engine more often, or lower the learning rate",
    ),
    Cause(
        "stale weights",
        lambda s: s["lag_mean"] >= 1,
        lambda s: f"stale weights: tokens are {s['lag_mean']:.2g} updates old",
        "allow less staleness, update the engine more often, or lower the learning rate",
    ),
    Cause(
        "weights never arrived",
        lambda s: s.is_growing and not s["lag_mean"] >= 0.5,
        lambda s: (
            f"weights never arrived: the gap grew from {s.gaps[0]:.2g} to {s.gaps[-1]:.2g} in {len(s.gaps)} steps "
            f"although the {s.facts.engine} says its version is fresh"
        ),
        "check that the engine loads what it is sent: names, adapters, a cache of prefixes kept across updates",
    ),
    Cause(
        "wrong temperature",
        lambda s: abs(s["surprise_corr"]) > 0.5,
        _temperature,
        "give engine and trainer the same rollout.temperature, and see that the server reports log-probs after it",
    ),
    Cause(
        "first token",
        lambda s: s["gap_first"] > 0.05 and s["gap_first"] > 5 * s["gap_rest"],
        lambda s: (
            f"an added BOS token, or a prompt encoded otherwise: the gap is {s['gap_first']:.2g} at the first token written and "
            f"{s['gap_rest']:.2g} after it"
        ),
        "send token ids, not text, and turn off the server's add_special_tokens",
    ),
    Cause(
        "re-encoding",
        lambda s: s["far_share"] > 1e-3 and s["gap_median"] < 0.1,
        lambda s: (
            f"a server that re-encodes text: {s['far_share']:.2%} of tokens are more than 20 times off, half of all less than "
            f"{s['gap_median']:.1g}"
        ),
        "take token ids from the engine, not text, and look at the worst tokens in the samples",
    ),
    Cause(
        "other weights",
        lambda s: s["gap_median"] > 0.5,
        lambda s: "weights never arrived, or are another model's: most tokens are far off",
        "check the model the engine serves, and that it loads what it is sent",
    ),
    Cause(
        "precision",
        lambda s: s["gap_median"] >= 0,
        _precision,
        "run the engine in the trainer's dtype (float16 or float32 for both if need be), or correct: correction=decoupled_token_is",
    ),
    Cause(
        "unknown",
        lambda s: True,
        lambda s: "not known, for the symptoms were not measured",
        "look at the worst tokens in the samples",
    ),
)


def diagnose(signs: Signs) -> Cause:
    """The first cause whose signs are there: those with the most particular signs come first."""
    return next(cause for cause in CAUSES if cause.holds(signs))


# --- the check ---------------------------------------------------------------------------------------------------------


@dataclass
class _Episode:
    """What was said since the numbers of a kind left their ranges."""

    said: set[str] = field(default_factory=set)
    num_healthy: int = 0


class Health:
    """Remembers how long each number has been out of range, and what was said."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._rules = rules
        self._num_out = dict.fromkeys(rules, 0)
        self._episodes: dict[str, _Episode] = {}
        self._gaps: deque[float] = deque(maxlen=MEMORY)

    def check(self, step: int, metrics: Mapping[str, float], context: Facts) -> list[str]:
        """The lines to print after a step: none while all is well or nothing new is known."""
        metrics = derived(metrics)
        if (gap := _gap_of(metrics)) is not None:
            self._gaps.append(gap)
        is_well: dict[str, bool] = {}
        broken: dict[str, list[str]] = {}
        for rule in self._rules:
            name = next((n for n in rule.metrics if n in metrics), None)
            is_out = name is not None and not rule.low <= metrics[name] <= rule.high
            self._num_out[rule] = self._num_out[rule] + 1 if is_out else 0
            is_well[rule.cause] = is_well.get(rule.cause, True) and not is_out
            if name is not None and self._num_out[rule] >= rule.patience:
                broken.setdefault(rule.cause, []).append(
                    f"{name} is {metrics[name]:.3g} (healthy {rule.low:g} to {rule.high:g})"
                )
        for kind, well in is_well.items():
            self._watch(kind, well)
        signs = Signs(metrics, self._gaps, context)
        return [line for kind, out in broken.items() for line in self._speak(step, kind, out, signs)]

    def _watch(self, kind: str, is_well: bool) -> None:
        """Ends the episode of a kind once none of its numbers has been out of range for a while."""
        episode = self._episodes.setdefault(kind, _Episode())
        episode.num_healthy = episode.num_healthy + 1 if is_well else 0
        if episode.num_healthy >= BACK:
            episode.said.clear()

    def _speak(self, step: int, kind: str, out: list[str], signs: Signs) -> list[str]:
        """The line on numbers of one kind that are out, unless this cause was named in this episode."""
        said = self._episodes[kind].said
        if kind:
            name, cause = kind, kind
            remedy = next(rule.remedy for rule in self._rules if rule.cause == kind)
        else:
            found = diagnose(signs)
            name, cause, remedy = found.name, found.cause(signs), found.remedy
        if name in said:
            return []
        said.add(name)
        more = f" and {len(out) - 1} more out of range" if len(out) > 1 else ""
        return [f"step {step}: {out[0]}{more}; likely cause: {cause}; try: {remedy}"]


def _gap_of(metrics: Mapping[str, float]) -> float | None:
    """The gap of a step's typical token: a mean is moved by a few absurd ones, and jumps about with their number."""
    return next((metrics[n] for n in ("mismatch/gap_median", "mismatch/mean") if n in metrics), None)
