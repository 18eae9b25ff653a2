"""Overhead of `placement=ray` on a step of the default job compared with one process, at the same time on the same machine.

    python bench/ray_overhead.py [--steps 30] [--profile] [key=value ...]

Both runs are in one driver and take turns, step by step, so that other load on the machine affects both equally; the
other run waits meanwhile. The recipe is recipes/sort_digits.yaml with a short warm start and without validation. A step
includes rollouts, rewards, learning and new weights. Writing metrics and samples is the same for both and is left out.

`local` is one process. `ray` is one worker and one engine that take turns on the same cores, with as many threads. The
table has medians over all steps but the first two, and the median ratio of the two in each step. `computing_s` is the
part of learning that the learner itself reports. `--profile` prints where the driver's time goes in the steps on Ray,
including waiting for workers.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import save, table

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.trainers import rl
from burnish.trainers.assembly import build_context
from burnish.trainers.context import StepResult, TrainContext
from burnish.trainers.performance import learner_metrics
from burnish.trainers.rl_run import checked_run, warm_start_folder
from burnish.trainers.warm_start import warm_start

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits.yaml"
FEW = ["warm_start.updates=120", "validation.before=false", "run.save_every=100000", "run.samples_every=100000"]
WARM = 2


def job_of(stack: ExitStack, name: str, overrides: list[str], folder: str) -> TrainContext:
    """A run that is ready for its first step."""
    loaded = load(TrainConfig, RECIPE, [*FEW, *overrides, f"run.directory={folder}", f"run.name={name}"])
    parts, run = stack.enter_context(checked_run(loaded.config, loaded.resolved, loaded.base, name))
    if loaded.config.warm_start is not None:
        parts.weights = warm_start_folder(run.directory)
        warm_start(parts, loaded.config.warm_start, run, parts.weights)
    job = build_context(parts, run)
    stack.callback(job.source.close)
    return job


def step_of(job: TrainContext, step: int) -> dict[str, float]:
    """One step, and what it took."""
    started = time.perf_counter()
    rollouts, batch = rl.collect_rollouts(job, step)
    sampled = time.perf_counter()
    learned = rl.learn(job, step, batch) if batch is not None else StepResult()
    updated = time.perf_counter()
    rl.after_step(job, step, rollouts, learned)
    ended = time.perf_counter()
    values = learner_metrics(job.learners, sampled)
    told = {name.partition("/")[2]: values.get(name, 0.0) for name in ("controller/messages", "controller/store_bytes")}
    computing_s = sum(
        values.get(f"time/{part}_s", 0.0) for part in ("forward", "backward", "optimizer", "communication")
    )
    return {
        "step_s": ended - started,
        "rollout_s": sampled - started,
        "learn_s": updated - sampled,
        "computing_s": computing_s,
        "settle_s": ended - updated,
    } | told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    places: dict[str, list[str]] = {
        "local": [f"run.threads={threads}"],
        "ray": ["placement=ray", f"placement.cpus={threads}"],
    }
    profile, found = cProfile.Profile(), {name: list[dict[str, float]]() for name in places}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        jobs = {name: job_of(stack, name, [*args.overrides, *where], folder) for name, where in places.items()}
        for step in range(1, args.steps + WARM + 1):
            for name, job in jobs.items():
                is_profiled = args.profile and name == "ray" and step > WARM
                found[name].append(profile.runcall(step_of, job, step) if is_profiled else step_of(job, step))
    rows: list[dict[str, Any]] = []
    for name, steps in found.items():
        medians = {key: statistics.median(one[key] for one in steps[WARM:]) for key in steps[0]}
        ratios = [one["step_s"] / other["step_s"] for one, other in zip(steps, found["local"], strict=True)][WARM:]
        rows.append({"placement": name, **medians, "overhead": statistics.median(ratios) - 1})
    print(table(rows, list(rows[0])))
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    save("ray_overhead", [{**row, "threads": threads, "machine_load": os.getloadavg()[0]} for row in rows])


if __name__ == "__main__":
    main()
