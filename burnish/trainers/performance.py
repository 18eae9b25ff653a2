"""Speed, memory and worker metrics of a step. They differ between two identical runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from burnish.core.engine import Engine
from burnish.distributed.engine_builder import find_paged_engine
from burnish.environments.host import EnvironmentHost
from burnish.memory_plan.from_config import PlannedRun
from burnish.memory_plan.planner import GIB
from burnish.memory_plan.suggestions import plan_error
from burnish.rollout.scoring import RolloutBatch
from burnish.training.interfaces import AnyLearner
from burnish.training.meter import MeterReading, peak_flops


def learner_metrics(learners: Sequence[AnyLearner], started: float) -> dict[str, float]:
    """Time, throughput and memory of the learners since `started`. Reading their meters waits for the device."""
    reading = reduce(add, [learner.meter.read() for learner in learners])
    learn_s = time.perf_counter() - started
    first = learners[0]
    peak = peak_flops(first.device, first.dtype)
    return time_metrics(reading, learn_s) | throughput_metrics(reading, peak) | first.usage()


def time_metrics(reading: MeterReading, learn_s: float) -> dict[str, float]:
    """Seconds per part of the learning phase; `other` is the rest."""
    values = {f"time/{part}_s": seconds for part, seconds in reading.seconds.items() if part != "other"}
    return values | {"time/learn_s": learn_s, "time/other_s": max(0.0, learn_s - sum(values.values()))}


def throughput_metrics(reading: MeterReading, peak: float | None) -> dict[str, float]:
    """Tokens and FLOPs per second of the learners, and their share of the device's peak if that is known."""
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


def rollout_throughput(rollouts: RolloutBatch) -> dict[str, float]:
    """Tokens per second of the rollouts; empty if they were read from the journal."""
    if rollouts.rollout_s == 0:
        return {}
    return {"performance/rollout_tokens_per_s": rollouts.num_tokens / rollouts.rollout_s}


def worker_metrics(environments: EnvironmentHost) -> dict[str, float]:
    """Counts of the environments' worker processes since the last step; empty without any."""
    counts = environments.new_worker_counts()
    return {f"performance/environment_workers/{name}": float(count) for name, count in counts.items()}


def draft_metrics(engine: Engine) -> dict[str, float]:
    """Draft tokens verified since the last step (validation included), and the share of them that was drawn.

    Empty without `rollout.speculation`, and for engines in other processes.
    """
    paged = find_paged_engine(engine)
    if paged is None or paged.speculation is None:
        return {}
    drafted, accepted = paged.take_draft_counts()
    values = {"performance/drafted_tokens": float(drafted), "performance/accepted_tokens": float(accepted)}
    return values | ({"performance/draft_acceptance": accepted / drafted} if drafted else {})


@dataclass
class MemoryPlanCheck:
    """Compares the memory plan of a stage with the measured peak, until the optimizer state is allocated."""

    planned: PlannedRun
    stage: str
    is_done: bool = False

    def after(self, updates: int, values: dict[str, float], tell: Callable[[str], None]) -> dict[str, float]:
        """Metrics of the plan's error after `updates` updates of the policy; `values` are the metrics of the step."""
        measured, made = values.get("memory/peak_gib"), self.planned.stages.get(self.stage)
        if self.is_done or not updates or measured is None or made is None:
            return {}
        expected = made.learners_peak(updates) if self.planned.is_gpu else made.total
        error, text = plan_error(expected, int(measured * GIB))
        self.is_done = updates > 1
        if self.planned.is_gpu:  # the resident size of a process is more than its tensors
            tell(text)
        return {"memory/planned_gib": expected / GIB, "memory/plan_error": error}
