"""Cost of measuring and correcting the mismatch: alone at 8 M tokens, and as a share of real training steps.

    python bench/correction.py [--tokens 8000000] [--sequences 4096] [--repeats 5] [--steps 12] [--threads 2] [--only steps]

The first rows time both forms, the symptoms, the profiles and a budget's step on a separate batch. The rows of a step
are runs of the trainer: the shape of `grpo_step_cpu.py` without and with a correction, and `recipes/sort_digits.yaml`
after its warm start. Their `wall_s` is all work of a step on the mismatch: report, weights, symptoms, profiles, worst
tokens with their text and file. `step_s` is the time from one commit to the next. Memory is the peak of that work,
including numpy, compared with the largest sum of tensors in use during the step; interpreter and libraries do not count.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import save, table
from grpo_step_cpu import config_for, make_model

from burnish.algorithms.correction.corrections import budget_correction, coupled_correction, decoupled_correction
from burnish.algorithms.correction.mismatch_diagnostics import (
    compare_tokens,
    mismatch_profiles,
    symptom_metrics,
    worst_tokens,
)
from burnish.algorithms.correction.spec import CoupledCorrection, DecoupledCorrection
from burnish.config.loading import load
from burnish.config.records import slot_options
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.run.metrics import read_metrics
from burnish.run.run import Run
from burnish.run.samples import WorstTokensFile
from burnish.trainers import pipeline, step_metrics
from burnish.trainers.rl_run import checked_run, execute

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits.yaml"
ALL = {
    "token_k1": (0.5, 2.0), "token_k2": 0.5, "token_k3": 0.5, "seq_sum_k1": (0.01, 100.0), "seq_sum_k2": 50.0, "seq_sum_k3": 50.0,
    "seq_mean_k1": (0.9, 1.1), "seq_mean_k2": 0.1, "seq_mean_k3": 0.1, "seq_max_k2": 5.0, "seq_max_k3": 5.0,
}  # fmt: skip
PARTS = (
    (pipeline, "apply_correction"),
    (pipeline, "gap_report"),
    (step_metrics, "worst_token_rows"),
    (WorstTokensFile, "append"),
)
"""All a step does about the gap."""
WINDOW = "the gap"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("alone", "steps"), help="one half, each of which has a file of results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only != "steps":
        rows = alone(args.tokens, args.sequences, args.repeats)
        print(table(rows, ["work", "tokens", "wall_s"]))
        print(f"saved {save('correction', rows)}")
    if args.only != "alone":
        rows = in_steps(args.steps, args.threads)
        print(table(rows, ["work", "tokens", "wall_s", "step_s", "time_share", "memory_share"]))
        print(f"saved {save('correction_steps', rows)}")


# --- on a batch of its own ---------------------------------------------------------------------------------------------


def alone(tokens: int, sequences: int, repeats: int) -> list[dict[str, Any]]:
    batch = make(tokens, sequences)
    jobs: dict[str, Callable[[], object]] = {
        "first form, report alone": lambda: coupled_correction(batch, **slot_options(CoupledCorrection(apply=False))),
        "first form, token TIS": lambda: coupled_correction(batch, **slot_options(CoupledCorrection())),
        "first form, sequence MIS": lambda: coupled_correction(
            batch, **slot_options(CoupledCorrection(level="sequence", mode="mask"))
        ),
        "second form, token TIS": lambda: decoupled_correction(
            batch, **slot_options(DecoupledCorrection(weights="token"))
        ),
        "second form, in full": lambda: decoupled_correction(
            batch, weights="token", threshold=2.0, batch_normalise=True, reject=ALL
        ),
        "symptoms": lambda: symptom_metrics(batch),
        "profiles and worst tokens": lambda: profiles_and_worst(batch),
        "budget, one step": lambda: budget_correction(batch, None, k3_kl=1.0, ess=0.5),
    }
    return [
        {"work": name, "system": "burnish", "tokens": batch.num_tokens, "wall_s": median(job, repeats)}
        for name, job in jobs.items()
    ]


def make(tokens: int, sequences: int) -> Batch:
    """Ragged answers behind one prompt token each, float32 log-probs a hundredth apart."""
    generator = torch.Generator().manual_seed(0)
    mean = tokens // sequences
    lengths = torch.randint(mean // 2, mean + mean // 2, (sequences,), generator=generator)
    offsets = offsets_from_lengths(lengths + 1)
    size = int(offsets[-1])
    mask = torch.ones(size, dtype=torch.bool).index_fill(0, offsets[:-1], False)
    old = -torch.rand(size, generator=generator) * 3
    behaviour = old + 0.01 * torch.randn(size, generator=generator)
    columns = {"action_mask": mask, "loss_mask": mask, "old_logp": old, "behaviour_logp": behaviour}
    return Batch(torch.zeros(size, dtype=torch.int64), offsets, columns)


def profiles_and_worst(batch: Batch) -> None:
    seen = compare_tokens(batch, batch.token["old_logp"], batch.action_mask)
    mismatch_profiles(seen)
    worst_tokens(seen, 8)


def median(job: Callable[[], object], repeats: int) -> float:
    job()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        job()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# --- in real steps -----------------------------------------------------------------------------------------------------


def in_steps(steps: int, threads: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder)
        make_model(shape)
        rows = [
            in_a_step(f"step of grpo_step_cpu, correction {name}", partial(grpo_step, shape, name), steps, threads)
            for name in ("none", "seed", "decoupled_k3_rs_token_tis")
        ]
    return [*rows, in_a_step("step of sort_digits, correction none", sort_digits, steps, threads)]


def grpo_step(shape: Path, correction: str, steps: int, folder: Path) -> tuple[TrainConfig, Path]:
    values = config_for(shape, steps).model_dump(exclude_unset=True)
    values["algorithm"] = {"correction": correction}
    values["run"] |= {"directory": str(folder), "name": "it"}
    return TrainConfig.model_validate(values), shape


def sort_digits(steps: int, folder: Path) -> tuple[TrainConfig, Path]:
    overrides = [f"training.steps={steps}", f"run.directory={folder}", "run.name=it"]
    rare = ["run.samples_every=1000", "run.save_every=1000", "validation={before: false, every: 1000, limit: 8}"]
    loaded = load(TrainConfig, RECIPE, [*overrides, *rare])
    return loaded.config, loaded.base


def in_a_step(
    work: str, make_config: Callable[[int, Path], tuple[TrainConfig, Path]], steps: int, threads: int
) -> dict[str, Any]:
    """Medians over the steps of one run but for the first and the last, which saves; memory from a run of three."""
    spent, peaks = Spent(), Peaks()
    with tempfile.TemporaryDirectory() as folder, spent.recording():
        tokens = train(*make_config(steps, Path(folder)), threads)
    with tempfile.TemporaryDirectory() as folder, peaks.recording():
        train(*make_config(3, Path(folder)), threads)
    step_s = [b - a for a, b in zip(spent.commits[:-2], spent.commits[1:-1], strict=True)]
    gap_s = spent.on_gap[1:-1]
    return {
        "work": work, "system": "burnish", "tokens": tokens, "wall_s": statistics.median(gap_s), "step_s": statistics.median(step_s),
        "time_share": statistics.median(gap / step for gap, step in zip(gap_s, step_s, strict=True)),
        "memory_share": peaks.gap / peaks.step, "gap_bytes": peaks.gap, "step_bytes": peaks.step,
    }  # fmt: skip


def train(config: TrainConfig, base: Path, threads: int) -> int:
    """A run to its end, quietly; the tokens of its last step."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"threads": threads})})
    with checked_run(config, {}, base, "it") as (parts, run):
        run.display._stream = None
        execute(parts, run)
        return int(read_metrics(run.directory.metrics)[-1]["rollout/tokens_used"])


@contextmanager
def replaced(owner: Any, name: str, make_new: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Something else under a name for a while."""
    old = getattr(owner, name)
    setattr(owner, name, make_new(old))
    try:
        yield
    finally:
        setattr(owner, name, old)


@dataclass
class Spent:
    """When each step was committed, and the seconds of each that went into the gap."""

    commits: list[float] = field(default_factory=list)
    on_gap: list[float] = field(default_factory=list)
    now: float = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in PARTS:
                stack.enter_context(replaced(owner, name, self._timed))
            stack.enter_context(replaced(Run, "commit", self._committed))
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            self.now += time.perf_counter() - started
            return result

        return call

    def _committed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = function(*args)
            self.commits.append(time.perf_counter())
            self.on_gap.append(self.now)
            self.now = 0.0
            return result

        return call


@dataclass
class Peaks:
    """Bytes in use at most: by the work on the gap above what there was before it, and by all tensors of a step."""

    gap: int = 0
    step: int = 0
    numpy: int = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in PARTS:
                stack.enter_context(replaced(owner, name, self._marked))
            stack.enter_context(replaced(Run, "commit", self._committed))
            yield

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not tracemalloc.is_tracing():
                return function(*args)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with torch.profiler.record_function(WINDOW):
                result = function(*args)
            self.numpy = max(self.numpy, tracemalloc.get_traced_memory()[1] - before)
            return result

        return call

    def _committed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The second step is looked at: between the first commit and the second."""

        def call(run: Run, step: int, *args: Any) -> Any:
            result = function(run, step, *args)
            if step == 1:
                self.in_use = tensors_in_use()
                self.profiler = torch.profiler.profile(profile_memory=True)
                tracemalloc.start()
                self.profiler.start()
            elif step == 2:
                self.profiler.stop()
                tracemalloc.stop()
                self._read()
            return result

        return call

    def _read(self) -> None:
        events = sorted(self.profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        windows = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == WINDOW]
        level = highest = 0
        at_start: dict[int, int] = {}
        for event in (e for e in events if e.name() == "[memory]"):
            level_before, level = level, level + event.nbytes()
            highest = max(highest, level)
            for k, (start, stop) in enumerate(windows):
                if start <= event.start_ns() <= stop:
                    self.gap = max(self.gap, level - at_start.setdefault(k, level_before))
        self.gap += self.numpy
        self.step = self.in_use + highest


def tensors_in_use() -> int:
    """Bytes of all tensors that are alive: weights, moments, caches."""
    alive = (obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
    return sum(storages.values())


if __name__ == "__main__":
    main()
