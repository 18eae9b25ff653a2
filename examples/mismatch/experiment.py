"""One run of the study: GRPO from a shared warm start, with or without a fault in the sampler, with or without a correction.

A fault affects the sampler, but the result of a run is its policy, so accuracy is measured twice. `engine` is the run's
own validation, through the sampler with its fault. `own` is the accuracy of the weights without the fault, the one of interest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from burnish.config.loading import Loaded, load
from burnish.config.schema import TrainConfig
from burnish.evaluation.evaluate import evaluate
from burnish.rollout.validation import sampling_options
from burnish.run.metrics import read_metrics
from burnish.run.run import Run
from burnish.trainers.assembly import RunParts
from burnish.trainers.rl_run import checked_run, execute, warm_start_folder
from burnish.trainers.warm_start import warm_start

RECIPE = Path(__file__).with_name("recipe.yaml")
CORRECTIONS = {
    "none": "none",
    "token_tis": "{name: decoupled_token_is, threshold: 5}",
    "sequence_mis": "{name: decoupled_seq_is_rs, threshold: 10, reject: {seq_sum_k1: 10}}",
}
"""Token TIS and sequence MIS with the upper ends of the bounds the field uses: what they cut is bias, and gaps are large here."""
LABELS = {"none": "no correction", "token_tis": "token TIS", "sequence_mis": "sequence MIS"}
MODE = "greedy"
ENGINE = f"validation/{MODE}/accuracy"
KL = ("mismatch/mismatch_k3_kl", "rollout_corr/k3_kl")  # without a correction, with one


def stale(steps: int) -> str:
    """The fault: the sampler has the weights of some steps ago, as when sampling runs beside training."""
    return f"rollout.mismatch={{name: stale, steps: {steps}}}"


def noise(scale: float, seed: int) -> str:
    """The fault: the sampler's weights moved in a random direction of the seed's."""
    return f"rollout.mismatch={{name: noise, scale: {scale}, seed: {seed}}}"


def make_start(folder: Path, seed: int, overrides: Iterable[str] = ()) -> Path:
    """A model directory after the recipe's supervised stage; every run of a seed starts from it."""
    loaded = _loaded(folder, f"start-{seed}", [f"seed={seed}", *overrides])
    stage = loaded.config.warm_start
    assert stage is not None
    with _quietly(folder / f"start-{seed}.log"), checked_run(*_arguments(loaded)) as (parts, run):
        model = warm_start_folder(run.directory)
        if not model.is_dir():
            warm_start(parts, stage, run, model)
        return model


def learn(folder: Path, name: str, start: Path, seed: int, overrides: Iterable[str]) -> dict[str, Any]:
    """Train from a start and measure: the accuracies at each validation, reward and KL (k3) of sampler and trainer by step."""
    shared = [f"seed={seed}", f"model.path={start.resolve()}", "model.new=null", "warm_start=null"]
    loaded = _loaded(folder, name, [*shared, *overrides])
    with _quietly(folder / f"{name}.log"), checked_run(*_arguments(loaded)) as (parts, run):
        if not execute(parts, run):
            raise RuntimeError(f"{name} was stopped")
        rows = read_metrics(run.directory.metrics)
        engine = {row["step"]: row[ENGINE] for row in rows if ENGINE in row}
        own = own_accuracies(parts, run, start)
    return {
        "accuracy": [
            [step, round(own[step], 4), round(engine[step], 4)] for step in sorted(own.keys() & engine.keys())
        ],
        "reward": [_short(row.get("reward/mean")) for row in rows if row["step"]],
        "k3_kl": [_short(next((row[key] for key in KL if key in row), None)) for row in rows if row["step"]],
    }


def own_accuracies(parts: RunParts, run: Run, start: Path) -> dict[int, float]:
    """Held-out accuracy of the start and of every checkpoint, sampled without the fault. Overwrites the policy's weights."""
    policy, mode = parts.policy, parts.config.validation.modes[MODE]
    options = sampling_options(mode, policy.tokenizer.eos_ids)
    found = {}
    for step, path in [(0, start), *((saved.step, saved.path) for saved in run.checkpoints.all())]:
        policy.load_weights(path)
        result = evaluate(policy, parts.rewards, parts.held_out, mode.n, options, lambda _: None)
        assert result.accuracy is not None
        found[step] = result.accuracy.mean
    return found


def _loaded(folder: Path, name: str, overrides: Iterable[str]) -> Loaded[TrainConfig]:
    return load(TrainConfig, RECIPE, [*overrides, f"run.directory={folder}", f"run.name={name}"])


def _arguments(loaded: Loaded[TrainConfig]) -> tuple[TrainConfig, dict[str, Any], Path, str]:
    return loaded.config, loaded.resolved, loaded.base, RECIPE.stem


@contextlib.contextmanager
def _quietly(log: Path) -> Iterator[None]:
    """What a run prints goes to a file: several of them run at once."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
