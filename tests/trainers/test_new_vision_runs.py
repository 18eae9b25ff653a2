"""A model that sees, made from nothing: its warm start reaches the tower, and RL goes through pictures from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.data.tasks.registry import make_task
from burnish.models.policy import load_policy
from burnish.run.metrics import read_metrics
from burnish.trainers import sft
from burnish.trainers.rl_run import checked_run, execute
from burnish.trainers.warm_start import load_warm_start_examples
from burnish.training.learner import Learner

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = [
    "model.new.hidden_size=32",
    "model.new.num_layers=1",
    "model.new.num_heads=2",
    "model.new.mlp_size=48",
    "warm_start.updates=3",
    "warm_start.batch_size=8",
    "rollout.prompts=2",
    "rollout.n=4",
    "training.steps=2",
    "validation.limit=4",
    "validation.every=2",
    "run.threads=1",
    "model.device=cpu",
]


@pytest.mark.parametrize("name", ["count_shapes", "click_target"])
def test_a_warm_start_on_pictures_trains_the_tower(name: str) -> None:
    config = load(TrainConfig, RECIPES / f"{name}.yaml", [*TINY, "warm_start.data.0.options.num=16"]).config
    assert config.warm_start is not None
    policy = load_policy(config.model, None, make_task(name, {}, 0).alphabet, seed=0)
    examples, _ = load_warm_start_examples(config.warm_start, config.data.template, 0, None, policy)
    assert all(len(example.pictures) == 1 for example in examples)
    before = {key: tensor.clone() for key, tensor in policy.module.state_dict().items()}
    learner = Learner(policy.module, config.warm_start.optimizer, 3, config.warm_start.token_budget)
    sft.train(learner, examples, config.warm_start, 0, lambda step, values: None)
    moved = [key for key, tensor in policy.module.state_dict().items() if not torch.equal(tensor, before[key])]
    assert any("vision" in key and "patch" in key for key in moved), moved


def test_rl_with_drawn_pictures_runs_and_what_the_engine_saw_is_what_the_learner_sees(tmp_path: Path) -> None:
    options = [*TINY, f"run.directory={tmp_path}", "warm_start.data.0.options.num=16", "algorithm.filters=[]"]
    loaded = load(TrainConfig, RECIPES / "count_shapes.yaml", options)
    with checked_run(loaded.config, loaded.resolved, loaded.base, "count") as (parts, run):
        assert execute(parts, run)
    steps = [row for row in read_metrics(run.directory.metrics) if row["step"] > 0]
    assert len(steps) == 2
    mismatch = [value for row in steps for key, value in row.items() if key.startswith("mismatch/") and "kl" in key]
    assert mismatch
    assert all(abs(value) < 1e-4 for value in mismatch)
