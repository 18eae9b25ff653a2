"""What may be wrong with how the policy behaves: its entropy, its lengths, what its reward pays for, the signal that is left.

Such failures are changes, not levels: an entropy of 0.1 is healthy for one model and a collapse for another. So a run is compared with its own first
steps (`Past.start`), and medians over some steps speak, never one batch. What looks like a failure in one number is none where the
others explain it: a policy that has solved its task is sure of itself, one that reasons longer and is right more often has not gone wild.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

NUM_FIRST_STEPS = 5
"""First steps of a run, whose median is what later ones are compared with."""
NUM_RECENT_STEPS = 5
"""Last steps, whose median is where a run is now."""
NUM_REMEMBERED_STEPS = 25
"""Steps that are remembered."""


ACCURACY = "reward/accuracy"
"""Only where a reward says what is correct; a graded reward has no value that means solved."""


class MetricHistory:
    """The numbers of a run, as far back as a judgement needs them."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self._best: dict[str, float] = {}
        self._peak: dict[str, float] = {}

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take in a step."""
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
        """Where a number was at first; nan where it was never measured: no comparison with that holds."""
        return median(self._first[name]) if name in self._first else math.nan

    def top(self, name: str) -> float:
        """The highest of the first steps, for what may begin to fall with the very first."""
        return max(self._first[name]) if name in self._first else math.nan

    def bottom(self, name: str) -> float:
        """The lowest of the first steps, for what may begin to rise with the very first."""
        return min(self._first[name]) if name in self._first else math.nan

    def now(self, name: str, steps: int = NUM_RECENT_STEPS) -> float:
        """Where it is."""
        return median(list(self._last[name])[-steps:]) if name in self._last else math.nan

    def was(self, name: str) -> float:
        """Where it was some steps ago; nan where the run is younger than that."""
        before = list(self._last.get(name, ()))[: -2 * NUM_RECENT_STEPS]
        return median(before[-NUM_RECENT_STEPS:]) if len(before) >= NUM_RECENT_STEPS else math.nan

    def best(self, name: str) -> float:
        """The highest of one step."""
        return self._best.get(name, math.nan)

    @property
    def peak(self) -> float:
        """Where the goal was when it was highest, over some steps."""
        return self._peak.get(self.goal, math.nan)

    @property
    def goal(self) -> str:
        """The number that is meant to rise: how often answers are right, or the reward where nothing says so."""
        return ACCURACY if ACCURACY in self._first else "reward/mean"

    @property
    def scale(self) -> float:
        """What a change of the goal is compared with: 1 for an accuracy, for graded rewards the largest that they were."""
        return 1.0 if self.goal == ACCURACY else max(abs(self.start(self.goal)), abs(self.best(self.goal)))

    @property
    def names(self) -> list[str]:
        return list(self._first)


@dataclass(frozen=True)
class PolicyRule:
    """A way to go wrong: what it looks like (None while it does not), what to call it, what to try."""

    name: str
    sees: Callable[[MetricHistory], str | None]
    cause: str
    remedy: str
    patience: int = 2
    """Steps in a row it must be seen."""


# --- what they look like -----------------------------------------------------------------------------------------------


def _from_to(past: MetricHistory, name: str) -> str:
    return f"{name} went from {past.start(name):.2g} to {past.now(name, 3):.2g}"


def _entropy_collapse(past: MetricHistory) -> str | None:
    """A fifth of the entropy is left, the task is not solved, and what was given up for it brought nothing lately."""
    start, now = past.top("actor/entropy"), past.now("actor/entropy", 3)
    solved = past.now(ACCURACY) >= 0.9
    gains = past.now(past.goal) > past.was(past.goal) + 0.03 * past.scale
    if start >= 0.02 and now < 0.2 * start and not solved and not gains:
        unknown = "" if past.goal == ACCURACY else " (graded: fine if that is the most there is)"
        return (
            f"actor/entropy went from {start:.2g} to {now:.2g} while {past.goal} is {past.now(past.goal):.2g}{unknown}"
        )
    return None


def _turning_into_noise(past: MetricHistory) -> str | None:
    """Far more entropy than at first, and fewer right answers."""
    start, now = past.start("actor/entropy"), past.now("actor/entropy", 3)
    if now > 2.5 * start and now > start + 0.5 and _accuracy_falls(past):
        return f"{_from_to(past, 'actor/entropy')} while {_from_to(past, past.goal)}"
    return None


def _accuracy_falls(past: MetricHistory) -> bool:
    """Whether a fifth of the right answers of the first steps is lost."""
    start = past.start(past.goal)
    return past.now(past.goal) < start - max(0.2 * abs(start), 0.02)


def _length_explosion(past: MetricHistory) -> str | None:
    """Twice as long as at first, and not better."""
    start, now = past.bottom("rollout/length_mean"), past.now("rollout/length_mean", 3)
    if now > 2 * start and not past.now(past.goal, 3) > past.start(past.goal) + 0.05 * past.scale:
        return (
            f"rollout/length_mean went from {start:.3g} to {now:.3g} while {past.goal} is {past.now(past.goal, 3):.2g}"
        )
    return None


def _format_hacking(past: MetricHistory) -> str | None:
    """A part of the reward rises while right answers fall. Of length the other rule speaks."""
    if past.goal != ACCURACY or not _accuracy_falls(past) or _length_explosion(past):
        return None
    parts = [name for name in past.names if name.startswith("reward/part/")] or ["reward/mean"]
    for name in parts:
        start, now = past.start(name), past.now(name, 3)
        if now - start > 0.2 * max(abs(start), abs(now), 0.5):
            return f"{_from_to(past, name)} while {_from_to(past, 'reward/accuracy')}"
    return None


def _all_solved(past: MetricHistory) -> str | None:
    """Nearly all groups are all right."""
    if past.now("rollout/zero_signal") >= 0.95 and past.now(ACCURACY) >= 0.95:
        return f"rollout/zero_signal is {past.now('rollout/zero_signal'):.2g} and reward/accuracy {past.now('reward/accuracy'):.2g}"
    return None


def _is_without_signal(past: MetricHistory) -> bool:
    return past.now("rollout/zero_signal") >= 0.9 and not past.now(ACCURACY) >= 0.5


def _broken_policy(past: MetricHistory) -> str | None:
    """No reward is left of what there was."""
    best = past.best("reward/mean")
    if _is_without_signal(past) and best > 0.05 and past.now("reward/mean") < 0.1 * best:
        return f"reward/mean was {best:.2g} and is {past.now('reward/mean'):.2g}; rollout/zero_signal is {past.now('rollout/zero_signal'):.2g}"
    return None


def _nothing_solved(past: MetricHistory) -> str | None:
    """Nearly all groups are all wrong, as they were."""
    if _is_without_signal(past) and not _broken_policy(past) and past.best(ACCURACY) < 0.05:
        return f"rollout/zero_signal is {past.now('rollout/zero_signal'):.2g} and reward/accuracy {past.now('reward/accuracy'):.2g}"
    return None


def _equal_rewards(past: MetricHistory) -> str | None:
    """Nearly all groups earn one reward each, where nothing says whether that is the highest or the lowest."""
    if past.goal != ACCURACY and past.now("rollout/zero_signal") >= 0.95 and not _broken_policy(past):
        return f"rollout/zero_signal is {past.now('rollout/zero_signal'):.2g} and reward/mean {past.now('reward/mean'):.2g}"
    return None


def _lost_ground(past: MetricHistory) -> str | None:
    """Two fifths of what was once reached are gone, and nothing above says why."""
    explained = _length_explosion(past) or _format_hacking(past) or _broken_policy(past)
    if past.now(past.goal) < past.peak - 0.4 * abs(past.peak) and not explained:  # rewards may be negative
        return f"{past.goal} was {past.peak:.2g} and is {past.now(past.goal):.2g}"
    return None


def _large_steps(past: MetricHistory) -> str | None:
    share = past.now("actor/pg_clipfrac", 3)
    return f"actor/pg_clipfrac is {share:.2g} (healthy 0 to 0.3)" if share > 0.3 else None


def _gradient_jump(past: MetricHistory) -> str | None:
    """Several steps in a row ten times the usual."""
    usual, now = past.was("actor/grad_norm"), past.now("actor/grad_norm", 3)
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
"""Each is judged on its own; those that would say the same of one run exclude each other."""
