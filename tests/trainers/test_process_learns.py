"""An implicit process reward model, trained online, learns to tell right answers from wrong ones on held-out prompts.

One seed, a warm start and 40 steps of the default task: about a minute of two cores. `bench/process_rewards.py` has three seeds. The
policy moves at a tenth of its usual speed: at full speed nearly all its answers are right before the model has seen many.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.run.metrics import read_metrics
from burnish.trainers.rl_run import checked_run, execute

RECIPE = Path(__file__).parents[2] / "recipes" / "sort_digits.yaml"
OVERRIDES = [
    "algorithm={preset: prime, process: {beta: 1.0, mini_batches: 4}}",
    "algorithm.process.optimizer={lr: 2.0e-4, betas: [0.9, 0.95], schedule: linear, final: 0.1}",
    "algorithm.filters=[zero_signal]",
    "algorithm.refill={oversample: 1, short: partial}",
    "algorithm.entropy.coef=0",
    "training.optimizer.lr=2.0e-5",
    "training.steps=40",
    "validation={limit: 500, every: 0}",
]


@pytest.mark.slow
def test_it_tells_right_from_wrong_on_held_out_prompts(tmp_path: Path) -> None:
    loaded = load(TrainConfig, RECIPE, [*OVERRIDES, f"run.directory={tmp_path}", "run.name=it", "run.threads=1"])
    with checked_run(loaded.config, loaded.resolved, loaded.base, "it") as (parts, run):
        assert execute(parts, run)
    first, *rows = read_metrics(tmp_path / "it" / "metrics.jsonl")
    last = rows[-1]
    assert first["validation/sampled/process_accuracy"] == 0.5
    # Outcomes are mixed, so that to say "right" every time would not do.
    assert 0.4 < last["validation/sampled/accuracy"] < 0.75
    assert last["validation/sampled/process_accuracy"] > 0.8
    assert last["validation/sampled/process_ranking"] > 0.85
    # And in time: answers of a step's batch, before the batch was learnt.
    ahead = [row["process/accuracy"] for row in rows[-10:]]
    assert sum(ahead) / len(ahead) > 0.8
