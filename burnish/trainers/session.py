"""One RL run from start to end, or from where it was: run directory, warm start, training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from burnish.config.load import dump
from burnish.config.schema import TrainConfig
from burnish.controller.roles import build_policy
from burnish.rewards.rewards import Rewards
from burnish.run.directory import RunDirectory
from burnish.run.run import Run
from burnish.run.trackers import check_trackers
from burnish.trainers import rl
from burnish.trainers.build import Parts, assemble, check_parts, demonstrations, warm_start
from burnish.trainers.job import restore


@contextmanager
def checked_run(config: TrainConfig, resolved: dict[str, Any], base: Path, name: str) -> Iterator[tuple[Parts, Run]]:
    """The parts of a run and its directory, which is made only when nothing is wrong with the parts."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    place = _place(config, name)
    with RunDirectory.claim(*place) as directory, Rewards(config.reward, base) as rewards:
        sources = [*config.data.train, *config.data.validation]
        policy = build_policy(config.model, sources, config.seed, base)
        parts = check_parts(config, base, policy, rewards)
        if config.warm_start is not None and not warm_folder(directory).is_dir():
            parts.examples, note = demonstrations(config.warm_start, config.data.template, config.seed, base, policy)
            parts.notes += [note] if note is not None else []
        directory.begin(place[2])
        with Run(directory, config.run, resolved) as run:
            yield parts, run


def execute(parts: Parts, run: Run) -> bool:
    """Warm start and RL, each only as far as it is not done. True when the run is complete."""
    config, warm = parts.config, warm_folder(run.directory)
    if config.warm_start is not None and warm.is_dir():
        parts.policy.load_weights(warm)
    elif config.warm_start is not None:
        warm_start(parts, config.warm_start, run, warm)
    job = assemble(parts, run)
    checkpoint = run.resume()
    if checkpoint is not None:
        restore(job, checkpoint.path)
    if job.state.step >= config.training.steps:
        run.display.note(f"{run.directory.path} is complete: all {config.training.steps} steps are done")
        return True
    return rl.train(job)


def warm_folder(directory: RunDirectory) -> Path:
    """Where the warm-started model lies; it is there whole or not at all."""
    return directory.path / "warm_start"


def _place(config: TrainConfig, name: str) -> tuple[Path, str, str]:
    return Path(config.run.directory), config.run.name or f"{name}-{config.seed}", dump(config)
