"""Seconds per step with sources sync, ahead and async, with one CPU for the learner and one for the engine.

    python bench/async_cpu.py [--steps 16] [--tokens 32] [--rounds 2]

A small new model, 24 prompts with 8 samples each, one worker and one engine of Ray with one thread each
(placement=ray, layout=split). The three sources take turns, so that other load on the machine affects all equally. The
table has medians over the steps after the first four. `machine_load` is the number of other running processes at the
start. With more work than cores, sampler and learner have no core to themselves, and there is little to gain.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import save, table

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.run.metrics import read_metrics
from burnish.trainers.rl_run import checked_run, execute

SOURCES = {
    "sync": "rollout.source=sync",
    "ahead": "rollout.source=ahead",
    "async": "rollout.source={name: async, max_staleness: 2}",
}
OPTIONS = [
    "model.new={family: llama, hidden_size: 96, num_layers: 2, num_heads: 4, mlp_size: 256, max_positions: 160}",
    "model.device=cpu",
    "data.train={task: sort_digits}",
    "reward={workers: 1, parts: [{name: format, options: {pattern: '[0-9]{3}.*'}}]}",
    "rollout.prompts=24",
    "algorithm={kl: {loss: {coef: 0}, reference: none}, correction: decoupled_token_is}",
    "training.optimizer.lr=1.0e-4",
    "validation.before=false",
    "run={samples_every: 1000, save_every: 1000}",
    "placement={name: ray, layout: split}",
]
WARM = 4


def steps_of(folder: Path, name: str, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of a run's steps, without the first."""
    loaded = load(TrainConfig, None, [*OPTIONS, *overrides, f"run.directory={folder}", f"run.name={name}"])
    with checked_run(loaded.config, loaded.resolved, folder, name) as (parts, run):
        assert execute(parts, run)
    return [row for row in read_metrics(folder / name / "metrics.jsonl") if row["step"] > WARM]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    sizes = [f"training.steps={args.steps}", f"rollout.max_tokens={args.tokens}"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SOURCES}
    with TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name, source in SOURCES.items():
                found[name] += steps_of(Path(folder), f"{name}-{number}", [source, *sizes])

    def middle(name: str, key: str) -> float | None:
        values = [row[key] for row in found[name] if key in row]
        return statistics.median(values) if values else None

    base = middle("sync", "time/step_s")
    assert base is not None
    rows = [
        {
            "source": name,
            "step_s": middle(name, "time/step_s"),
            "times_sync": base / (middle(name, "time/step_s") or base),
            "learn_s": middle(name, "time/learn_s"),
            "rollout_s": middle(name, "time/rollout_s"),
            "wait_s": middle(name, "time/rollout_wait_s"),
            "sync_s": middle(name, "time/sync_s"),
            "staleness": middle(name, "staleness/mean"),
            "steps": len(found[name]),
            "machine_load": load_before,
        }
        for name in SOURCES
    ]
    print(table(rows, list(rows[0])))
    print("saved", save("async_cpu", rows).name)


if __name__ == "__main__":
    main()
