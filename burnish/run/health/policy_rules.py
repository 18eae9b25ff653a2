"""Rules for a policy that degrades: entropy, length, reward hacking, and missing learning signal.

Such failures are changes, not levels: an entropy of 0.1 is healthy for one model and a collapse for another. So a run is
compared with its own first steps (`MetricHistory.start`), by medians over several steps, never by one batch. A change in
one metric is no failure if others explain it: a policy that has solved its task has low entropy, and longer answers that
are right more often are fine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

NUM_FIRST_STEPS = 5
"""Number of first steps whose median is the baseline."""
NUM_RECENT_STEPS = 5
"""Number of last steps whose median is the current value."""
NUM_REMEMBERED_STEPS = 25
MIN_INFORMATION = 0.02
"""Mutual information of prompt and answer, in nats per token, from which its fall is more than noise."""
ACCURACY = "reward/accuracy"
"""Exists only if the reward tells correct answers from wrong ones. A graded reward has no value that means solved."""


class MetricHistory:
    """The metrics of a run, as far back as the rules need them."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self._best: dict[str, float] = {}
        self._peak: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add a step."""
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                first = self._first.setdefault(name, [])
                if len(first) < NUM_FIRST_STEPS:
                    first.append(value)
                self._last.setdefault(name, deque(maxlen=NUM_REMEMBERED_STEPS)).append(value)
                self._best[name] = max(value, self._best.get(name, -math.inf))
        if len(self._last.get(self.goal, ())) >= NUM_RECENT_STEPS:
            self._peak[self.goal] = max(self.now(self.goal), self._peak.get(self.goal, -math.inf))

    def start(self, name: str) -> float:
        """Median of the first steps; nan if the metric was never measured, so that every comparison is False."""
        return median(self._first[name]) if name in self._first else math.nan

    def top(self, name: str) -> float:
        """Maximum of the first steps, for metrics that may fall from the first step on."""
        return max(self._first[name]) if name in self._first else math.nan

    def bottom(self, name: str) -> float:
        """Minimum of the first steps, for metrics that may rise from the first step on."""
        return min(self._first[name]) if name in self._first else math.nan

    def now(self, name: str, steps: int = NUM_RECENT_STEPS) -> float:
        """Median of the last steps."""
        return median(list(self._last[name])[-steps:]) if name in self._last else math.nan

    def was(self, name: str) -> float:
        """Median of some steps before the recent ones; nan if the run is too short."""
        before = list(self._last.get(name, ()))[: -2 * NUM_RECENT_STEPS]
        return median(before[-NUM_RECENT_STEPS:]) if len(before) >= NUM_RECENT_STEPS else math.nan

    def best(self, name: str) -> float:
        """Maximum over all steps."""
        return self._best.get(name, math.nan)

    @property
    def peak(self) -> float:
        """The highest median of the goal so far."""
        return self._peak.get(self.goal, math.nan)

    @property
    def goal(self) -> str:
        """The metric that should rise: accuracy, or the mean reward if there is no accuracy."""
        return ACCURACY if ACCURACY in self._first else "reward/mean"

    @property
    def scale(self) -> float:
        """Unit for changes of the goal: 1 for accuracy, the largest absolute value so far for graded rewards."""
        return 1.0 if self.goal == ACCURACY else max(abs(self.start(self.goal)), abs(self.best(self.goal)))

    @property
    def names(self) -> list[str]:
        return list(self._first)


@dataclass(frozen=True)
class PolicyRule:
    """A kind of failure: its symptom (`sees` returns None if it is absent), its likely cause, and a remedy."""

    name: str
    sees: Callable[[MetricHistory], str | None]
    cause: str
    remedy: str
    patience: int = 2
    """Number of steps in a row in which it must be seen."""


def _from_to(history: MetricHistory, name: str) -> str:
    return f"{name} went from {history.start(name):.2g} to {history.now(name, 3):.2g}"


def _entropy_collapse(history: MetricHistory) -> str | None:
    """Less than a fifth of the entropy is left, the task is not solved, and the goal has not risen lately."""
    start, now = history.top("actor/entropy"), history.now("actor/entropy", 3)
    solved = history.now(ACCURACY) >= 0.9
    if start >= 0.02 and now < 0.2 * start and not solved and not _goal_rises(history):
        unknown = "" if history.goal == ACCURACY else " (graded: fine if that is the most there is)"
        return f"actor/entropy went from {start:.2g} to {now:.2g} while {history.goal} is {history.now(history.goal):.2g}{unknown}"
    return None


def _goal_rises(history: MetricHistory) -> bool:
    """Whether the goal is above what it was ten steps ago."""
    return history.now(history.goal) > history.was(history.goal) + 0.03 * history.scale


def _template_collapse(history: MetricHistory) -> str | None:
    """Answers depend on their prompts less than a third as much as at first, or repeat over prompts, while entropy is there.

    The metrics are those of `training.collapse_every`. A task with few possible answers repeats them from the start.
    """
    entropy_left = history.now("actor/entropy", 3) > 0.3 * history.start("actor/entropy")
    if not entropy_left or history.now(ACCURACY) >= 0.9 or _goal_rises(history):
        return None
    name, repeated = "collapse/mutual_information", "collapse/repeated_answers"
    if history.start(name) > MIN_INFORMATION and history.now(name, 3) < 0.3 * history.start(name):
        return f"{_from_to(history, name)} while actor/entropy is {history.now('actor/entropy', 3):.2g}"
    if history.now(repeated, 3) > history.bottom(repeated) + 0.4:
        return f"{_from_to(history, repeated)} while actor/entropy is {history.now('actor/entropy', 3):.2g}"
    return None


def _turning_into_noise(history: MetricHistory) -> str | None:
    """Entropy is far above its start, and fewer answers are right."""
    start, now = history.start("actor/entropy"), history.now("actor/entropy", 3)
    if now > 2.5 * start and now > start + 0.5 and _accuracy_falls(history):
        return f"{_from_to(history, 'actor/entropy')} while {_from_to(history, history.goal)}"
    return None


def _accuracy_falls(history: MetricHistory) -> bool:
    """Whether the goal is a fifth below its start."""
    start = history.start(history.goal)
    return history.now(history.goal) < start - max(0.2 * abs(start), 0.02)


def _length_explosion(history: MetricHistory) -> str | None:
    """Answers are twice as long as at the start, and not better."""
    start, now = history.bottom("rollout/length_mean"), history.now("rollout/length_mean", 3)
    if now > 2 * start and not history.now(history.goal, 3) > history.start(history.goal) + 0.05 * history.scale:
        return f"rollout/length_mean went from {start:.3g} to {now:.3g} while {history.goal} is {history.now(history.goal, 3):.2g}"
    return None


def _format_hacking(history: MetricHistory) -> str | None:
    """A part of the reward rises while accuracy falls. `_length_explosion` covers growing lengths."""
    if history.goal != ACCURACY or not _accuracy_falls(history) or _length_explosion(history):
        return None
    parts = [name for name in history.names if name.startswith("reward/part/")] or ["reward/mean"]
    for name in parts:
        start, now = history.start(name), history.now(name, 3)
        if now - start > 0.2 * max(abs(start), abs(now), 0.5):
            return f"{_from_to(history, name)} while {_from_to(history, 'reward/accuracy')}"
    return None


def _all_solved(history: MetricHistory) -> str | None:
    """In nearly all groups, all samples are right."""
    if history.now("rollout/zero_signal") >= 0.95 and history.now(ACCURACY) >= 0.95:
        return f"rollout/zero_signal is {history.now('rollout/zero_signal'):.2g} and reward/accuracy {history.now('reward/accuracy'):.2g}"
    return None


def _is_without_signal(history: MetricHistory) -> bool:
    return history.now("rollout/zero_signal") >= 0.9 and not history.now(ACCURACY) >= 0.5


def _broken_policy(history: MetricHistory) -> str | None:
    """Nearly all of the reward that the policy once had is gone."""
    best = history.best("reward/mean")
    if _is_without_signal(history) and best > 0.05 and history.now("reward/mean") < 0.1 * best:
        return f"reward/mean was {best:.2g} and is {history.now('reward/mean'):.2g}; rollout/zero_signal is {history.now('rollout/zero_signal'):.2g}"
    return None


def _nothing_solved(history: MetricHistory) -> str | None:
    """In nearly all groups, all samples are wrong, and they always were."""
    if _is_without_signal(history) and not _broken_policy(history) and history.best(ACCURACY) < 0.05:
        return f"rollout/zero_signal is {history.now('rollout/zero_signal'):.2g} and reward/accuracy {history.now('reward/accuracy'):.2g}"
    return None


def _equal_rewards(history: MetricHistory) -> str | None:
    """In nearly all groups, all samples have the same graded reward, which may be the highest or the lowest."""
    if history.goal != ACCURACY and history.now("rollout/zero_signal") >= 0.95 and not _broken_policy(history):
        return f"rollout/zero_signal is {history.now('rollout/zero_signal'):.2g} and reward/mean {history.now('reward/mean'):.2g}"
    return None


def _lost_ground(history: MetricHistory) -> str | None:
    """The goal is two fifths below its peak, and no other rule explains it."""
    explained = _length_explosion(history) or _format_hacking(history) or _broken_policy(history)
    if history.now(history.goal) < history.peak - 0.4 * abs(history.peak) and not explained:  # rewards may be negative
        return f"{history.goal} was {history.peak:.2g} and is {history.now(history.goal):.2g}"
    return None


def _large_steps(history: MetricHistory) -> str | None:
    share = history.now("actor/pg_clipfrac", 3)
    return f"actor/pg_clipfrac is {share:.2g} (healthy 0 to 0.3)" if share > 0.3 else None


def _gradient_jump(history: MetricHistory) -> str | None:
    """The gradient norm has been ten times its usual value for several steps."""
    usual, now = history.was("actor/grad_norm"), history.now("actor/grad_norm", 3)
    if usual > 0 and now > 10 * usual:
        return f"actor/grad_norm went from {usual:.2g} to {now:.2g} in ten steps"
    return None


POLICY_RULES: tuple[PolicyRule, ...] = (
    PolicyRule(
        "length explosion",
        _length_explosion,
        "length explosion: answers grow, and are not better",
        "look at the longest samples and at the parts of the reward that pay for length; algorithm.shaping=[soft_overlong], "
        "algorithm.aggregation=token-mean or algorithm=dr_grpo, which do not favour long wrong answers; a lower learning rate",
    ),
    PolicyRule(
        "format hacking",
        _format_hacking,
        "format hacking: the policy earns a part of its reward without the answer",
        "lower that part's weight, or pay it only for right answers; look at the samples of highest reward that are wrong; "
        "algorithm.advantage=gdpo, which weighs parts apart",
    ),
    PolicyRule(
        "entropy collapse",
        _entropy_collapse,
        "entropy collapse: the policy has hardly anything left to choose from, and what it has not found it will not find",
        "a lower learning rate or fewer updates a step; algorithm.clip.high=0.28 (DAPO), algorithm.entropy.adaptive, or "
        "algorithm=clip_cov; a KL term to the reference",
    ),
    PolicyRule(
        "template collapse",
        _template_collapse,
        "template collapse: the answers no longer depend on the prompt, which a high entropy hides",
        "algorithm.filters=[snr], which keeps the groups whose rewards differ most (RAGEN-2); a smaller KL or entropy term, which is all that "
        "groups without a difference learn from; more samples of each prompt (rollout.n); read samples of several prompts side by side",
    ),
    PolicyRule(
        "noise",
        _turning_into_noise,
        "the policy is turning into noise: it is less and less sure, and right less often",
        "a lower learning rate, a smaller entropy bonus, training.optimizer.clip_norm, more samples a step",
    ),
    PolicyRule(
        "all groups solved",
        _all_solved,
        "all groups solved: nearly every sample of nearly every prompt is right, so that there is nothing left to compare",
        "stop here, or harder prompts (data.train, algorithm.curriculum); algorithm.filters=[zero_signal] with "
        "algorithm.refill draws others in their place",
        patience=5,
    ),
    PolicyRule(
        "broken policy",
        _broken_policy,
        "the policy broke: hardly a sample earns what most did before, so that no gradient leads back",
        "go on from an earlier checkpoint with a learning rate ten times lower, with warm-up; training.optimizer.clip_norm",
        patience=4,
    ),
    PolicyRule(
        "lost ground",
        _lost_ground,
        "the policy has become worse than it was (unless its prompts have become harder)",
        "go on from the best checkpoint with a lower learning rate or fewer updates a step; look at mismatch/ and at the samples",
        patience=4,
    ),
    PolicyRule(
        "nothing solved",
        _nothing_solved,
        "hardly any sample is right, so that there is nothing to compare",
        "easier prompts or more samples of each (rollout.n), a warm start; check the reward on a right answer of your own",
        patience=10,
    ),
    PolicyRule(
        "equal rewards",
        _equal_rewards,
        "the samples of nearly every prompt all earn the same reward, so that there is nothing to compare",
        "look at the samples: prompts that are all too easy or all too hard, or a reward that does not tell answers apart; more samples of "
        "each prompt (rollout.n), a reward with more grades",
        patience=10,
    ),
    PolicyRule(
        "large steps",
        _large_steps,
        "the policy moves so far within a step that the clip cuts much of the loss",
        "a lower learning rate, fewer training.epochs or training.mini_batches",
    ),
    PolicyRule(
        "gradient jump",
        _gradient_jump,
        "gradients are ten times what they were",
        "a lower learning rate, training.optimizer.clip_norm; look at the batch's longest samples and rewards",
    ),
)
"""Each rule is checked independently. Rules that would report the same problem exclude each other."""
