"""Short real runs for the health rules: three healthy runs, and five that fail in one particular way each.

    python bench/health_runs.py                   # all; about three minutes on two cores
    python bench/health_runs.py length_explosion  # some

A small decoder learns to sort digits. The values of every step that a rule can read are saved in
tests/run/health_runs/<name>.json, so that tests replay real numbers quickly. The row of a run below says why it fails: too
large steps, a format that is rewarded without the answer, a reward for words, problems that are too easy.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.run.metrics import read_metrics
from burnish.trainers.assembly import diagnosis_facts
from burnish.trainers.rl_run import checked_run, execute

FOLDER = Path(__file__).parent.parent / "tests" / "run" / "health_runs"
BASE = """
model:
  new: {family: llama, hidden_size: 64, num_layers: 2, num_heads: 4, mlp_size: 160, max_positions: 96}
data: {train: {task: sort_digits, options: {min_digits: 4, max_digits: 6}}, max_prompt_tokens: 16}
warm_start:
  data: {task: sort_digits, options: {num: 2000, min_digits: 4, max_digits: 6}}
  updates: 150
  batch_size: 64
  optimizer: {lr: 5.0e-3, betas: [0.9, 0.95], warmup: 20, schedule: linear, final: 0.1}
reward: {parts: task, workers: 1}
rollout: {prompts: 16, n: 8, max_tokens: 10, max_rows: 128}
algorithm: {preset: grpo, kl: {loss: {coef: 0}, reference: none}}
training: {steps: 60, optimizer: {lr: 2.0e-4, betas: [0.9, 0.95]}}
run: {samples_every: 1000, save_every: 1000, threads: 1}
"""
REWARDS = '''
def wordy(data_source, solution_str, ground_truth, extra_info):
    """Pays for every character."""
    return min(1.0, len(solution_str) / 40)
'''
SHORT = r"[{name: task, weight: 0.3}, {name: format, weight: 1.0, options: {pattern: '\d{1,2}'}}]"

RUNS: dict[str, list[str]] = {
    "healthy_grpo": [],
    "healthy_dapo": ["algorithm.preset=dapo", "algorithm.refill.rounds=2", "algorithm.refill.short=partial"],
    "healthy_rloo": ["algorithm.preset=rloo", "seed=3"],
    "broken_policy": ["training.optimizer.lr=5e-3"],
    "entropy_collapse": [
        "algorithm.preset=raft_plus_plus",
        "training.epochs=4",
        "training.optimizer.lr=1e-3",
    ],
    "format_hacking": [f"reward.parts={SHORT}", "training.optimizer.lr=1e-3"],
    "length_explosion": [
        "reward.parts=[{name: task, weight: 0.5}, {name: rewards.py:wordy, weight: 1.0}]",
        "rollout.max_tokens=48",
        "training.optimizer.lr=1e-3",
    ],
    "all_solved": [
        "data.train={task: sort_digits, options: {min_digits: 2, max_digits: 2}}",
        "warm_start.data={task: sort_digits, options: {num: 2000, clean: true, min_digits: 2, max_digits: 2}}",
    ],
}
KEPT = r"reward/.*|rollout/.*|actor/(entropy|grad_norm|pg_clipfrac)|mismatch/(mean|share|balance|heat|heat_fit|sure_lean|lag_.*|far_share|surprise_.*|mismatch_.*kl|.*_is_.*)"
"""What a rule reads."""


def make(name: str, folder: Path, more: list[str] | None = None) -> tuple[list[dict[str, Any]], list[str], str]:
    """The metrics of a run made now, what its health check said, and what its filters prefer (`Facts.selection`)."""
    (folder / "recipe.yaml").write_text(BASE)
    (folder / "rewards.py").write_text(REWARDS)
    overrides = [*RUNS[name], *(more or []), f"run.directory={folder}", f"run.name={name}"]
    loaded = load(TrainConfig, folder / "recipe.yaml", overrides)
    with checked_run(loaded.config, loaded.resolved, loaded.base, name) as (parts, run):
        assert execute(parts, run)
    said = [line for line in (folder / name / "log.txt").read_text().splitlines() if "; likely cause: " in line]
    return read_metrics(folder / name / "metrics.jsonl"), said, diagnosis_facts(loaded.config).selection


def columns(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """What of every step's metrics a rule may read, to four digits; null where a step does not have it."""
    names = ["step", *sorted({name for row in rows for name in row if re.fullmatch(KEPT, name)})]
    return {name: [_short(row.get(name)) for row in rows] for name in names}


def _short(value: Any) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, int | float) and math.isfinite(value) else None


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            rows, said, selection = make(name, Path(folder))
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(column)}" for key, column in columns(rows).items())
        (FOLDER / f"{name}.json").write_text(f'{{"selection": "{selection}", "columns": {{\n{lines}\n}}}}\n')
        print(name, *said, sep="\n  ")


if __name__ == "__main__":
    main()
