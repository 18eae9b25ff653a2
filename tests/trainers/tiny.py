"""Runs of a fraction of a second, for tests over several steps."""

from __future__ import annotations

import json
from pathlib import Path

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.trainers.rl_run import checked_run, execute

TINY = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 32, max_positions: 64}}
data: {train: {task: sort_digits, limit: 12, options: {min_digits: 2, max_digits: 3}}}
reward: {workers: 1}
rollout: {prompts: 4, n: 4, max_tokens: 4}
training: {steps: 4, optimizer: {lr: 1.0e-2}}
algorithm: {kl: {loss: {coef: 0}, reference: none}}
run: {samples_every: 100, save_every: 100}
"""
ROWS = [{"prompt": f"{k}>", "answer": f"{k}", "length": k, "backwards": -k} for k in range(11, 23)]
WARM = """
warm_start:
  data: {task: sort_digits, options: {num: 200, clean: true, min_digits: 2, max_digits: 3}}
  updates: 60
  batch_size: 32
  optimizer: {lr: 1.0e-2}
"""


def run_of(folder: Path, text: str, overrides: list[str]) -> Path:
    """A finished run's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(text)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    loaded = load(TrainConfig, folder / "tiny.yaml", [*overrides, f"run.directory={folder}", "run.name=it"])
    with checked_run(loaded.config, loaded.resolved, loaded.base, "it") as (parts, run):
        assert execute(parts, run)
    return folder / "it"
