"""One RL run from start to end, or from where it was: run directory, warm start, training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from burnish.config.load import completed, dump
from burnish.config.placement import scores_elsewhere
from burnish.config.schema import TrainConfig
from burnish.controller.judge import EngineJudge
from burnish.controller.memory import planned
from burnish.controller.placement import check_placement
from burnish.controller.roles import build_outline, build_policy, build_scorers, policy_updates
from burnish.controller.start import open_cluster
from burnish.data.pool import ReadRows
from burnish.rewards.parts import JUDGE, MODEL
from burnish.rewards.rewards import Rewards
from burnish.run.directory import RunDirectory, run_name
from burnish.run.files import FolderId
from burnish.run.metrics import read
from burnish.run.run import Run
from burnish.run.trackers import check_trackers
from burnish.trainers import rl
from burnish.trainers.build import Parts, assemble, check_inputs, check_parts, demonstrations, warm_damage, warm_start
from burnish.trainers.data_checks import read_checked, repeated
from burnish.trainers.inputs import keep_inputs
from burnish.trainers.job import restore
from burnish.trainers.memory import MemoryWatch
from burnish.training.profile import step_to_profile
from burnish.training.schedule import described


@contextmanager
def checked_run(
    config: TrainConfig, resolved: dict[str, Any], base: Path, name: str, replaced: FolderId | None = None
) -> Iterator[tuple[Parts, Run]]:
    """The parts of a run and its directory, which is made only when nothing is wrong with the parts.

    `replaced` is the folder of an old run of this name, which is moved to another name at that moment.
    """
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    place = _place(config, name)
    elsewhere = scores_elsewhere(config.placement)
    with (
        RunDirectory.claim(*place, partial(completed, TrainConfig), replaced) as directory,
        Rewards(config.reward, base, elsewhere, config.training.steps) as rewards,
    ):
        check_placement(config.placement)
        rows = read_checked(config, base, rewards)
        sources = [*config.data.train, *config.data.validation]
        is_here = config.placement.name == "local"
        memory = planned(config, base) if is_here else None
        notes = [memory.text, *memory.check()] if memory is not None else []
        warm = warm_folder(directory)
        has_warm = warm.is_dir() and not directory.is_replaced
        damage = warm_damage(warm) if config.warm_start is not None and has_warm else None
        needs_warmth = config.warm_start is not None and (damage is not None or not has_warm)
        notes += [f"{warm}: {damage}; the warm start is made again"] if damage is not None else []
        # Where others train, this process holds weights for a warm start only, and then no more.
        model = config.model if is_here or needs_warmth else config.model.model_copy(update={"device": "cpu"})
        policy = build_policy(model, sources, config.seed, base)
        kinds = (JUDGE,) if elsewhere else (MODEL, JUDGE)
        scorers = build_scorers(config.reward, policy.tokenizer, base, kinds)
        rewards.hand_in(scorers)
        notes += [scorer.note for scorer in scorers.values() if isinstance(scorer, EngineJudge)]
        parts = check_parts(config, base, policy, rewards, rows.take)
        parts.notes = [*notes, *repeated(config, rows.sizes), *parts.notes]
        parts.memory = MemoryWatch(memory, "training") if memory is not None else None
        if config.warm_start is not None and needs_warmth:
            parts.makes_warm_start = True
            parts.examples, note = demonstrations(config.warm_start, config.data.template, config.seed, base, policy)
            parts.notes += [note] if note is not None else []
        with open_cluster(config) as parts.cluster:
            directory.begin(place[2])
            parts.notes += keep_inputs(directory.path, config, resolved, base, directory.forget_rollouts)
            with Run(directory, config.run, resolved) as run:
                yield parts, run


def check_directory(config: TrainConfig, name: str) -> None:
    """Refuse a config that the run of this name cannot go on with; takes no lock and writes nothing."""
    RunDirectory.check(*_place(config, name), partial(completed, TrainConfig))


def check_without_weights(config: TrainConfig, base: Path, name: str, rewards: Rewards, read: ReadRows) -> None:
    """The checks of `checked_run` that need the policy's tokenizer and architecture, but neither its weights nor a server."""
    policy = build_outline(config.model, [*config.data.train, *config.data.validation], config.seed, base)
    build_scorers(config.reward, policy.tokenizer, base, kinds=())
    check_inputs(config, base, policy, rewards, read)
    root, folder, _ = _place(config, name)
    if config.warm_start is not None and not warm_folder(RunDirectory(root / folder)).is_dir():
        demonstrations(config.warm_start, config.data.template, config.seed, base, policy)


def execute(parts: Parts, run: Run, profile: int | None = None) -> bool:
    """Warm start and RL, each only as far as it is not done. True when the run is complete.

    `profile` is the step to record with a profiler, or `NEXT`.
    """
    config, warm = parts.config, warm_folder(run.directory)
    if config.warm_start is not None and parts.makes_warm_start:
        warm_start(parts, config.warm_start, run, warm)
    elif config.warm_start is not None and parts.cluster is None:
        parts.policy.load_weights(warm)
    parts.weights = warm if config.warm_start is not None else None
    job = assemble(parts, run)
    try:
        checkpoint = run.resume()
        if checkpoint is not None:
            restore(job, checkpoint.path)
            job.health.recall(read(run.directory.metrics), job.facts)
        if job.state.step >= config.training.steps:
            run.display.note(f"{run.directory.path} is complete: all {config.training.steps} steps are done")
            return True
        if run.directory.changes_training:
            run.display.note(described(config.training.optimizer, job.learner.updates, policy_updates(config)))
        job.profile = step_to_profile(profile, job.state.step, config.training.steps)
        return rl.train(job)
    finally:
        job.source.close()


def warm_folder(directory: RunDirectory) -> Path:
    """Where the warm-started model lies; it is there whole or not at all."""
    return directory.path / "warm_start"


def _place(config: TrainConfig, name: str) -> tuple[Path, str, str]:
    return Path(config.run.directory), run_name(config.run.name, name, config.seed), dump(config)
