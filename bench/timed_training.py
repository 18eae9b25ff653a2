"""One training against the clock, in a process of its own: it trains a recipe and measures held-out accuracy at marks in time.

`time_to_reward.py` starts it with a `Job` in a JSON file. The clock starts when that process is started, so it includes the start of
Python, all imports, reading the data and loading the weights. It stands still while a mark is measured. A step that would end after the
next mark is not started: the mark is measured first, with the weights of that moment, and then the training continues. The learning rate
follows the recipe's own schedule over its own number of steps, so a mark shows the run that `burnish train` makes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LATE_FACTOR = 1.1
"""How much longer than the median of the last steps the next one is assumed to take."""
RECENT_STEPS = 5
"""Steps whose median time predicts the next one, and whose rewards are reported with a mark."""
FIRST_STEP_S = 1.0
"""Assumed time of the first step, so that a mark at 0 seconds measures the base model."""
MEDIANS = ("time/rollout_s", "time/learn_s", "rollout/tokens", "rollout/tokens_used", "rollout/length_mean")
"""Metrics of a step whose medians explain its time."""


@dataclass
class Job:
    """What one process trains and measures."""

    task: str
    system: str
    """The name of these settings in the table."""
    seed: int
    recipe: str
    overrides: list[str]
    marks: list[float]
    """Seconds of the clock, rising. 0 measures the base model."""
    rows_file: str
    """Where the rows go, after every mark."""
    started: float
    """`time.time()` when the process was started."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Copied into every row."""


class Clock:
    """Seconds since the process was started, without those of measuring."""

    def __init__(self, started: float) -> None:
        self._started, self._paused = started, 0.0

    def seconds(self) -> float:
        """The time so far."""
        return time.time() - self._started - self._paused

    def pause(self, seconds: float) -> None:
        """Take seconds off the clock."""
        self._paused += seconds


def predicted_step_s(step_times: list[float]) -> float:
    """An upper estimate of the next step's time. The first step also compiles, so it counts only while it is the only one."""
    recent = step_times[1:][-RECENT_STEPS:] or step_times
    return LATE_FACTOR * statistics.median(recent) if recent else FIRST_STEP_S


def train(job: Job) -> list[dict[str, Any]]:
    """Train until the last mark is measured or the recipe's steps are done. Returns a row for each mark, and saves them on the way."""
    from burnish.config.loading import load
    from burnish.config.schema import TrainConfig
    from burnish.run.metrics import read_metrics
    from burnish.run.supervisor.liveness import StopOnInterrupt
    from burnish.trainers.assembly import build_context
    from burnish.trainers.rl import train_step
    from burnish.trainers.rl_run import checked_run
    from burnish.trainers.step_commit import UnscoredSteps

    clock, rows, step_times, marks = Clock(job.started), list[dict[str, Any]](), list[float](), list(job.marks)
    loaded = load(TrainConfig, Path(job.recipe), job.overrides)
    with checked_run(loaded.config, loaded.resolved, loaded.base, "timed") as (parts, run):
        num_questions = len(parts.held_out)
        context = build_context(parts, run)
        if run.resume() is not None:
            raise SystemExit(
                f"{run.directory.path} has a checkpoint, and a clock cannot be resumed: give another folder"
            )
        context.stream.open_journal(run.directory.tasks, run.last_step)
        num_steps, unscored, paused_processor_s = loaded.config.training.steps, UnscoredSteps(), 0.0
        run.display.start(f"{job.system}, seed {job.seed}: {context.policy.note}", num_steps, 0)
        facts: dict[str, Any] = {"ready_s": clock.seconds()}
        with StopOnInterrupt(run.display.note, end_early=context.source.stop) as stop:
            while marks:
                step = context.state.step + 1
                is_last = step == num_steps  # it would also validate and save a checkpoint, on the clock
                if is_last or clock.seconds() + predicted_step_s(step_times) > marks[0]:
                    facts |= {"mark_s": marks.pop(0), "seconds": clock.seconds(), "load": os.getloadavg()[0]}
                    facts["processor_s"] = time.process_time() - paused_processor_s
                    began, began_processor_s = time.time(), time.process_time()
                    measured = context.validate(context.state.step)
                    facts["evaluation_s"] = time.time() - began
                    clock.pause(facts["evaluation_s"])
                    paused_processor_s += time.process_time() - began_processor_s
                    history = read_metrics(run.directory.metrics)
                    rows.append(mark_row(job, facts, measured, num_questions, history, step_times))
                    Path(job.rows_file).write_text(json.dumps(rows, indent=1) + "\n")
                    if is_last and marks:
                        raise SystemExit(
                            f"the recipe's {num_steps} steps end after {clock.seconds():.0f} s, before the mark of {marks[0]:g} s: give more "
                            "with training.steps"
                        )
                    continue
                began = time.time()
                is_stopping = train_step(context, step, unscored, stop)
                step_times.append(time.time() - began)
                if is_stopping:
                    break
        run.display.stop()
        context.source.close()
    return rows


def mark_row(
    job: Job,
    facts: dict[str, Any],
    measured: dict[str, float],
    num_questions: int,
    history: list[dict[str, Any]],
    step_times: list[float],
) -> dict[str, Any]:
    """The row of a mark: the accuracy with Wilson's interval over the questions, and what the training had done by then.

    A question whose answer could not be scored counts as wrong.
    """
    from burnish.evaluation.statistics import wilson_interval

    num_scored = num_questions - measured.get("validation/greedy/failed", 0.0)
    interval = wilson_interval(measured["validation/greedy/accuracy"] * num_scored / num_questions, num_questions)
    row = {"task": job.task, "system": job.system, "seed": job.seed, **facts}
    row |= {"accuracy": interval.mean, "ci": [interval.low, interval.high], "questions": num_questions}
    row |= {name: measured[f"validation/greedy/{name}"] for name in ("length_mean", "truncated")}
    row |= {"steps": len(step_times), "first_step_s": step_times[0] if step_times else None}
    row["step_s"] = statistics.median(step_times[1:]) if len(step_times) > 1 else None
    for name in MEDIANS:
        values = [metrics[name] for metrics in history[1:] if name in metrics]
        row[f"median {name}"] = statistics.median(values) if values else None
    rewards = [metrics["reward/mean"] for metrics in history[-RECENT_STEPS:] if "reward/mean" in metrics]
    row["reward_of_last_steps"] = statistics.fmean(rewards) if rewards else None
    return row | job.facts


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    for row in train(job):
        done = f"{row['accuracy']:.3f} after {row['seconds']:.1f} s, {row['steps']} steps"
        print(f"{job.task}, {job.system}, seed {job.seed}: {done}", flush=True)


if __name__ == "__main__":
    main()
