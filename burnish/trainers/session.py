"""One RL run from start to end, or from where it was: run directory, warm start, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from burnish.config.load import dump
from burnish.config.schema import TrainConfig
from burnish.controller.roles import build_policy
from burnish.rewards.rewards import Rewards
from burnish.run.directory import RunDirectory
from burnish.run.run import Run
from burnish.trainers import rl
from burnish.trainers.build import build_job, warm_start


def open_run(config: TrainConfig, resolved: dict[str, Any], name: str) -> Run:
    """The run's directory, new or to be continued."""
    directory = RunDirectory.create(
        Path(config.run.directory), config.run.name or f"{name}-{config.seed}", dump(config)
    )
    return Run(directory, config.run, resolved)


def execute(config: TrainConfig, base: Path, run: Run) -> bool:
    """Warm start and RL, each only as far as it is not done. True when the run is complete."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    warm = run.directory.path / "warm_start"
    with Rewards(config.reward, base) as rewards:
        sources = [*config.data.train, *config.data.validation]
        policy = build_policy(config.model, sources, config.seed, base, warm if warm.is_dir() else None)
        if config.warm_start is not None and not warm.is_dir():
            warm_start(config.warm_start, config.data.template, config.seed, base, run, policy)
        job = build_job(config, base, run, policy, rewards)
        checkpoint = run.resume()
        if checkpoint is not None:
            rl.restore(job, checkpoint.path)
        if job.state.step >= config.training.steps:
            run.display.note(f"{run.directory.path} is complete: all {config.training.steps} steps are done")
            return True
        return rl.train(job)
