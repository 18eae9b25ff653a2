"""The health monitor: prints one line when a metric leaves its healthy range, with the likely cause and a remedy.

Rules and causes are tables: `mismatch_causes.py` for a gap between engine and trainer, `policy_rules.py` for a policy that
degrades. `HealthMonitor.check` is called once per step with the step's metrics and the relevant settings. It reports
each cause once per episode. An episode begins when a metric has been out of range long enough. It ends when all metrics of
its kind have been back in range for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from burnish.run.health.mismatch_causes import ONE_SIDED_BALANCE, GapHistory, HealthContext, Symptoms, diagnose
from burnish.run.health.policy_rules import POLICY_RULES, MetricHistory, PolicyRule

RECOVERY_STEPS = 3
"""Healthy steps that end an episode, so that a metric that oscillates around its bound is one episode."""
POLICY_RECOVERY_STEPS = 20
"""The same for policy rules, whose metrics change slowly."""
DIAGNOSIS_STEPS = 5
"""Number of out-of-range steps that a diagnosis uses, so that it does not depend on the noise of one batch."""
CONFIRM_STEPS = 2
"""Steps in a row that must name a second cause of the same episode before it is reported."""
SURPRISE_STEPS = 10
"""Steps over which surprise is averaged. One step of a few hundred tokens is too noisy."""
SURPRISE_STANDARD_ERRORS = 5
"""Standard errors of surprise that count as chance."""


@dataclass(frozen=True)
class RangeRule:
    """A metric and its healthy range."""

    metrics: tuple[str, ...]
    """Names of the metric. The first name that a step has is used."""
    low: float
    high: float
    patience: int
    """Number of steps in a row that it must be out of range."""
    cause: str = ""
    """The likely cause; empty if `diagnose` finds it from the other metrics."""
    remedy: str = ""


def _metric_names(name: str, second: str = "") -> tuple[str, ...]:
    """Return a metric's names in the two naming schemes of rollout correction."""
    return f"mismatch/{name}", f"rollout_corr/{second or name}"


RANGE_RULES: tuple[RangeRule, ...] = (
    # One such token makes its whole row wrong, so even a small fraction matters.
    RangeRule(_metric_names("rollout_is_catastrophic_token_fraction"), 0.0, 0.01, 2),
    RangeRule(_metric_names("rollout_is_veto_fraction"), 0.0, 0.05, 2),
    RangeRule(_metric_names("rollout_is_eff_sample_size"), 0.8, 1.0, 2),
    RangeRule(_metric_names("rollout_is_mean"), 0.5, 2.0, 2),
    RangeRule(_metric_names("rollout_is_std"), 0.0, 0.5, 2),
    RangeRule(_metric_names("mismatch_kl", "kl"), -0.1, 0.1, 2),
    # bfloat16 against bfloat16 gives 1e-4 to 1e-3. Beyond that, a token's probability is typically 4% off.
    RangeRule(_metric_names("mismatch_k3_kl", "k3_kl"), 0.0, 1e-3, 2),
    # Tokens whose probabilities differ 20-fold: too few to move a mean, too many to be noise.
    RangeRule(("mismatch/far_share",), 0.0, 1e-3, 2),
    # A gap of a few percent in one direction stays below the bounds above, but biases every gradient.
    RangeRule(("mismatch/one_sided",), 0.0, 2e-3, 3),
    RangeRule(("mismatch/heated",), -0.03, 0.03, 2),
    # There is no gap, but the tokens were not sampled from the reported distribution.
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
    metrics: Mapping[str, float], surprises: Sequence[Mapping[str, float]], context: HealthContext
) -> dict[str, float]:
    """Return the metrics with values that are derived from several of them:

    - `mismatch/one_sided`: the mean gap if the engine is surer everywhere, else 0;
    - `mismatch/heated`: the temperature error (`heat`) if it explains nearly all of the gap, else 0;
    - `mismatch/surprise`: the mean excess of `surprises` (the last steps) beyond chance and beyond what the gap explains.
    """
    is_one_sided = metrics.get("mismatch/balance", 0.0) < ONE_SIDED_BALANCE
    is_heated = abs(metrics.get("mismatch/heat_fit", 0.0)) > 0.9 and abs(metrics.get("mismatch/sure_lean", 0.0)) > 0.95
    found = {
        "mismatch/one_sided": metrics.get("mismatch/mean", 0.0) if is_one_sided else 0.0,
        "mismatch/heated": metrics["mismatch/heat"] if is_heated and not is_one_sided else 0.0,
    }
    if "mismatch/surprise_excess" in metrics:
        found["mismatch/surprise"] = _pooled_surprise(surprises, context)
    return {**metrics, **found}


def _pooled_surprise(steps: Sequence[Mapping[str, float]], context: HealthContext) -> float:
    excess, gap = (sum(m[f"mismatch/surprise_{name}"] for m in steps) / len(steps) for name in ("excess", "gap"))
    error = math.sqrt(sum(m["mismatch/surprise_error"] ** 2 for m in steps)) / len(steps)
    beyond = abs(excess) - SURPRISE_STANDARD_ERRORS * error - 3 * gap
    judged = {"none": (-1, 1), "unlikely": (-1,)}.get(context.selection, ())
    sign = math.copysign(1, excess)
    return sign * max(0.0, beyond) if sign in judged else 0.0


@dataclass
class _Episode:
    """What was reported since the metrics of one kind left their ranges, and the next candidate."""

    reported: set[str] = field(default_factory=set)
    num_healthy: int = 0
    next: str = ""
    num_next: int = 0


class HealthMonitor:
    """Tracks how long each metric has been out of range, the history of the gap, and what was reported."""

    def __init__(
        self, rules: Sequence[RangeRule] = RANGE_RULES, policy_rules: Sequence[PolicyRule] = POLICY_RULES
    ) -> None:
        self._rules, self._policy_rules = rules, policy_rules
        self._num_out: dict[RangeRule | PolicyRule, int] = dict.fromkeys([*rules, *policy_rules], 0)
        self._metric_history = MetricHistory()
        self._episodes: dict[str, _Episode] = {}
        self._gap_history = GapHistory()
        self._surprises: deque[Mapping[str, float]] = deque(maxlen=SURPRISE_STEPS)
        self._unhealthy_steps: deque[Mapping[str, float]] = deque(maxlen=DIAGNOSIS_STEPS)

    def check(self, step: int, metrics: Mapping[str, float], context: HealthContext) -> list[str]:
        """Return the lines to print after a step; none if all is well or nothing is new."""
        metrics = self._add_step(metrics, context)
        is_healthy: dict[str, bool] = {}
        broken: dict[str, list[str]] = {}
        for rule in self._rules:
            name = next((n for n in rule.metrics if n in metrics), None)
            is_out = name is not None and not rule.low <= metrics[name] <= rule.high
            self._num_out[rule] = self._num_out[rule] + 1 if is_out else 0
            is_healthy[rule.cause] = is_healthy.get(rule.cause, True) and not is_out
            if name is not None and self._num_out[rule] >= rule.patience:
                broken.setdefault(rule.cause, []).append(
                    f"{name} is {metrics[name]:.3g} (healthy {rule.low:g} to {rule.high:g})"
                )
        for kind, healthy in is_healthy.items():
            self._update_episode(kind, healthy)
        if not is_healthy.get("", True):
            self._unhealthy_steps.append(metrics)
        symptoms = Symptoms(self._unhealthy_steps, self._gap_history, context)
        lines = [line for kind, out in broken.items() for line in self._range_lines(step, kind, out, symptoms)]
        return lines + self._policy_lines(step, metrics)

    def recall(self, rows: Sequence[Mapping[str, float]], context: HealthContext) -> None:
        """Restore the state of a resumed run from its earlier metrics, so that nothing is reported again."""
        for row in rows:
            if "reward/mean" in row or "rollout/length_mean" in row:  # skip rows that are only a validation
                self.check(int(row["step"]), row, context)

    def explain(self, metrics: Mapping[str, float], context: HealthContext) -> str:
        """Return the likely cause and the remedy of a gap so large that its step was aborted."""
        self._unhealthy_steps.append(self._add_step(metrics, context))
        symptoms = Symptoms(self._unhealthy_steps, self._gap_history, context)
        found = diagnose(symptoms)
        return f"{found.cause(symptoms)}; try: {found.remedy}"

    def _policy_lines(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the lines of the policy rules."""
        self._metric_history.add(metrics)
        lines = []
        for rule in self._policy_rules:
            seen = rule.sees(self._metric_history)
            self._num_out[rule] = self._num_out[rule] + 1 if seen else 0
            self._update_episode(rule.name, seen is None, POLICY_RECOVERY_STEPS)
            reported = self._episodes[rule.name].reported
            if seen and self._num_out[rule] >= rule.patience and not reported:
                reported.add(rule.name)
                lines.append(f"step {step}: {seen}; likely cause: {rule.cause}; try: {rule.remedy}")
        return lines

    def _add_step(self, metrics: Mapping[str, float], context: HealthContext) -> dict[str, float]:
        """Add a step to the histories; return its metrics with the derived ones."""
        if "mismatch/share" in metrics:
            self._gap_history.add(metrics["mismatch/share"], metrics.get("mismatch/lag_mean", 0.0))
        if "mismatch/surprise_excess" in metrics:
            self._surprises.append(metrics)
        return with_derived_metrics(metrics, self._surprises, context)

    def _update_episode(self, kind: str, is_healthy: bool, recovery_steps: int = RECOVERY_STEPS) -> None:
        """End the episode of a kind once all of its metrics have been in range for a while."""
        episode = self._episodes.setdefault(kind, _Episode())
        episode.num_healthy = episode.num_healthy + 1 if is_healthy else 0
        if episode.num_healthy >= recovery_steps:
            self._episodes[kind] = _Episode(num_healthy=episode.num_healthy)
            if not kind:
                self._unhealthy_steps.clear()

    def _range_lines(self, step: int, kind: str, out: list[str], symptoms: Symptoms) -> list[str]:
        """Return the line about the metrics of one kind that are out of range, unless the cause was reported in this episode."""
        episode = self._episodes[kind]
        if kind:
            name, cause = kind, kind
            remedy = next(rule.remedy for rule in self._rules if rule.cause == kind)
        else:
            found = diagnose(symptoms)
            name, cause, remedy = found.name, found.cause(symptoms), found.remedy
        episode.num_next = episode.num_next + 1 if name == episode.next else 1
        episode.next = name
        if name in episode.reported or (episode.reported and episode.num_next < CONFIRM_STEPS):
            return []
        episode.reported.add(name)
        more = f" and {len(out) - 1} more out of range" if len(out) > 1 else ""
        return [f"step {step}: {out[0]}{more}; likely cause: {cause}; try: {remedy}"]
