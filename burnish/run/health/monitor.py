"""A health check that speaks: one line when a number leaves its healthy range, with the likely cause and what to try.

Rules are data, and so are causes: of a gap between engine and trainer (`diagnosis.py`), and of a policy that goes astray
(`behaviour.py`). `Health.check` is called once a step with the step's metrics (those of rollout correction and of
`burnish.algorithms.correction.mismatch_diagnostics` among them) and the facts of the configuration. It is quiet while all is well, and says each
cause once an episode: from the first number that has been out of its range long enough until all of that kind have been
back for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from burnish.run.health.mismatch_causes import ONE_SIDED_BALANCE, GapHistory, HealthContext, Symptoms, diagnose
from burnish.run.health.policy_rules import POLICY_RULES, MetricHistory, PolicyRule

RECOVERY_STEPS = 3
"""Healthy steps that end an episode: a number that swings around the end of its range is one episode."""
POLICY_RECOVERY_STEPS = 20
"""The same for how the policy behaves, which changes slowly."""
DIAGNOSIS_STEPS = 5
"""Steps out of range that a diagnosis is made from, so that the noise of one batch does not make it."""
CONFIRM_STEPS = 2
"""Steps in a row that must name a second cause of the same episode before it is said."""
SURPRISE_STEPS = 10
"""Steps over which surprise is averaged: one of a few hundred tokens says nothing."""
SURPRISE_STANDARD_ERRORS = 5
"""Standard errors of surprise that are put down to chance."""


@dataclass(frozen=True)
class RangeRule:
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


def _metric_names(name: str, second: str = "") -> tuple[str, ...]:
    """A number's names in the first and the second form of rollout correction."""
    return f"mismatch/{name}", f"rollout_corr/{second or name}"


RANGE_RULES: tuple[RangeRule, ...] = (
    # A row with such a token is wrong as a whole, so that few are many; sizes of noise are seen at once.
    RangeRule(_metric_names("rollout_is_catastrophic_token_fraction"), 0.0, 0.01, 2),
    RangeRule(_metric_names("rollout_is_veto_fraction"), 0.0, 0.05, 2),
    RangeRule(_metric_names("rollout_is_eff_sample_size"), 0.8, 1.0, 2),
    RangeRule(_metric_names("rollout_is_mean"), 0.5, 2.0, 2),
    RangeRule(_metric_names("rollout_is_std"), 0.0, 0.5, 2),
    RangeRule(_metric_names("mismatch_kl", "kl"), -0.1, 0.1, 2),
    # bfloat16 against bfloat16 is at 1e-4 to 1e-3; beyond, a token's probability is typically 4% off.
    RangeRule(_metric_names("mismatch_k3_kl", "k3_kl"), 0.0, 1e-3, 2),
    # Too few to move a mean, too many to be noise: log-probs that differ 20 times.
    RangeRule(("mismatch/far_share",), 0.0, 1e-3, 2),
    # A few percent off, always the same way, hide below the bounds above and bias every gradient.
    RangeRule(("mismatch/one_sided",), 0.0, 2e-3, 3),
    RangeRule(("mismatch/heated",), -0.03, 0.03, 2),
    # No gap, and yet not drawn from what is reported.
    RangeRule(("mismatch/surprise",), -0.02, 0.02, 2),
    RangeRule(
        ("rollout/truncated",),
        0.0,
        0.5,
        3,
        "most answers are cut at their length limit, so that the reward judges unfinished text",
        "raise rollout.max_tokens, or see that the chat template's end token stops generation",
    ),
)


def with_derived_metrics(
    metrics: Mapping[str, float], surprises: Sequence[Mapping[str, float]], facts: HealthContext
) -> dict[str, float]:
    """The metrics with what is read off several of them:

    - `mismatch/one_sided`, the mean gap where the engine is surer everywhere, else 0;
    - `mismatch/heated`, the heat where it explains nearly all of the gap, else 0;
    - `mismatch/surprise`, the mean excess of `surprises` (the last steps) beyond chance and beyond what a gap explains.
    """
    is_one_sided = metrics.get("mismatch/balance", 0.0) < ONE_SIDED_BALANCE
    is_heated = abs(metrics.get("mismatch/heat_fit", 0.0)) > 0.9 and abs(metrics.get("mismatch/sure_lean", 0.0)) > 0.95
    found = {
        "mismatch/one_sided": metrics.get("mismatch/mean", 0.0) if is_one_sided else 0.0,
        "mismatch/heated": metrics["mismatch/heat"] if is_heated and not is_one_sided else 0.0,
    }
    if "mismatch/surprise_excess" in metrics:
        found["mismatch/surprise"] = _pooled_surprise(surprises, facts)
    return {**metrics, **found}


def _pooled_surprise(steps: Sequence[Mapping[str, float]], facts: HealthContext) -> float:
    excess, gap = (sum(m[f"mismatch/surprise_{name}"] for m in steps) / len(steps) for name in ("excess", "gap"))
    error = math.sqrt(sum(m["mismatch/surprise_error"] ** 2 for m in steps)) / len(steps)
    beyond = abs(excess) - SURPRISE_STANDARD_ERRORS * error - 3 * gap
    judged = {"none": (-1, 1), "unlikely": (-1,)}.get(facts.selection, ())
    sign = math.copysign(1, excess)
    return sign * max(0.0, beyond) if sign in judged else 0.0


# --- the check ---------------------------------------------------------------------------------------------------------


@dataclass
class _Episode:
    """What was said since the numbers of a kind left their ranges, and what may be said next."""

    said: set[str] = field(default_factory=set)
    num_healthy: int = 0
    next: str = ""
    num_next: int = 0


class HealthMonitor:
    """Remembers how long each number has been out of range, how the gap came, and what was said."""

    def __init__(
        self, rules: Sequence[RangeRule] = RANGE_RULES, behaviours: Sequence[PolicyRule] = POLICY_RULES
    ) -> None:
        self._rules, self._behaviours = rules, behaviours
        self._num_out: dict[RangeRule | PolicyRule, int] = dict.fromkeys([*rules, *behaviours], 0)
        self._past = MetricHistory()
        self._episodes: dict[str, _Episode] = {}
        self._course = GapHistory()
        self._surprises: deque[Mapping[str, float]] = deque(maxlen=SURPRISE_STEPS)
        self._ill: deque[Mapping[str, float]] = deque(maxlen=DIAGNOSIS_STEPS)

    def check(self, step: int, metrics: Mapping[str, float], context: HealthContext) -> list[str]:
        """The lines to print after a step: none while all is well or nothing new is known."""
        metrics = self._taken_in(metrics, context)
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
        if not is_well.get("", True):
            self._ill.append(metrics)
        signs = Symptoms(self._ill, self._course, context)
        lines = [line for kind, out in broken.items() for line in self._speak(step, kind, out, signs)]
        return lines + self._astray(step, metrics)

    def recall(self, rows: Sequence[Mapping[str, float]], context: HealthContext) -> None:
        """Go on where a run was: its earlier steps are taken in, and what was said of them is not said again."""
        for row in rows:
            if "reward/mean" in row or "rollout/length_mean" in row:  # not one that only measured
                self.check(int(row["step"]), row, context)

    def explain(self, metrics: Mapping[str, float], context: HealthContext) -> str:
        """The likely cause of a gap so large that its step was not finished, and what to try."""
        self._ill.append(self._taken_in(metrics, context))
        signs = Symptoms(self._ill, self._course, context)
        found = diagnose(signs)
        return f"{found.cause(signs)}; try: {found.remedy}"

    def _astray(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """The lines on what the policy does."""
        self._past.see(metrics)
        lines = []
        for behaviour in self._behaviours:
            seen = behaviour.sees(self._past)
            self._num_out[behaviour] = self._num_out[behaviour] + 1 if seen else 0
            self._watch(behaviour.name, seen is None, POLICY_RECOVERY_STEPS)
            said = self._episodes[behaviour.name].said
            if seen and self._num_out[behaviour] >= behaviour.patience and not said:
                said.add(behaviour.name)
                lines.append(f"step {step}: {seen}; likely cause: {behaviour.cause}; try: {behaviour.remedy}")
        return lines

    def _taken_in(self, metrics: Mapping[str, float], facts: HealthContext) -> dict[str, float]:
        """The metrics with what is derived from them and from the steps before."""
        if "mismatch/share" in metrics:
            self._course.see(metrics["mismatch/share"], metrics.get("mismatch/lag_mean", 0.0))
        if "mismatch/surprise_excess" in metrics:
            self._surprises.append(metrics)
        return with_derived_metrics(metrics, self._surprises, facts)

    def _watch(self, kind: str, is_well: bool, back: int = RECOVERY_STEPS) -> None:
        """Ends the episode of a kind once none of its numbers has been out of range for a while."""
        episode = self._episodes.setdefault(kind, _Episode())
        episode.num_healthy = episode.num_healthy + 1 if is_well else 0
        if episode.num_healthy >= back:
            self._episodes[kind] = _Episode(num_healthy=episode.num_healthy)
            if not kind:
                self._ill.clear()

    def _speak(self, step: int, kind: str, out: list[str], signs: Symptoms) -> list[str]:
        """The line on numbers of one kind that are out, unless this cause was named in this episode."""
        episode = self._episodes[kind]
        if kind:
            name, cause = kind, kind
            remedy = next(rule.remedy for rule in self._rules if rule.cause == kind)
        else:
            found = diagnose(signs)
            name, cause, remedy = found.name, found.cause(signs), found.remedy
        episode.num_next = episode.num_next + 1 if name == episode.next else 1
        episode.next = name
        if name in episode.said or (episode.said and episode.num_next < CONFIRM_STEPS):
            return []
        episode.said.add(name)
        more = f" and {len(out) - 1} more out of range" if len(out) > 1 else ""
        return [f"step {step}: {out[0]}{more}; likely cause: {cause}; try: {remedy}"]
