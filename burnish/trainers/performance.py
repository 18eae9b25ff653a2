"""How fast a step was and what it held: metrics that two identical runs do not share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce
from operator import add

from burnish.rollout.scored import Scored
from burnish.training.interfaces import AnyLearner
from burnish.training.meter import Reading
from burnish.training.peak import peak_flops


def learner_values(learners: Sequence[AnyLearner], started: float) -> dict[str, float]:
    """Of the learners that worked since `started`; their meters are read, which waits for their device."""
    reading = reduce(add, [learner.meter.read() for learner in learners])
    learn_s = time.perf_counter() - started
    first = learners[0]
    peak = peak_flops(first.device, first.dtype)
    return time_values(reading, learn_s) | rate_values(reading, peak) | first.usage()


def time_values(reading: Reading, learn_s: float) -> dict[str, float]:
    """The split of the learning phase; what the learners' parts leave of it is other."""
    values = {f"time/{part}_s": seconds for part, seconds in reading.seconds.items() if part != "other"}
    return values | {"time/learn_s": learn_s, "time/other_s": max(0.0, learn_s - sum(values.values()))}


def rate_values(reading: Reading, peak: float | None) -> dict[str, float]:
    """Tokens and operations a second while the learners worked, and their share of the device's peak where that is known."""
    seconds = reading.total_s
    if seconds == 0 or reading.tokens == 0:
        return {}
    values = {"performance/learn_tokens_per_s": reading.tokens / seconds}
    if reading.needed is None or reading.executed is None:
        return values
    values["performance/tflops_per_s"] = reading.executed / seconds / 1e12
    if peak is not None:
        values["performance/mfu"] = reading.needed / seconds / peak
        values["performance/hfu"] = reading.executed / seconds / peak
    return values


def rollout_rate(rollouts: Scored) -> dict[str, float]:
    """Tokens a second of the rollouts; nothing where they were taken from the journal."""
    if rollouts.rollout_s == 0:
        return {}
    return {"performance/rollout_tokens_per_s": rollouts.num_tokens / rollouts.rollout_s}
