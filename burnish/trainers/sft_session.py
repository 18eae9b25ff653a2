"""One supervised run from start to end, or from where it was: run directory, updates, checkpoints."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.config.load import dump
from burnish.config.schema import SftConfig
from burnish.controller.memory import planned
from burnish.controller.roles import build_policy
from burnish.data.supervised import Example, load_examples
from burnish.models.activations import set_activations
from burnish.models.policy import PolicyModel, pick_device
from burnish.run.contents import Blob, Snapshot
from burnish.run.directory import RunDirectory
from burnish.run.follower import Follower
from burnish.run.interrupt import StopOnInterrupt
from burnish.run.metrics import read
from burnish.run.run import Run
from burnish.run.staging import Stage
from burnish.run.trackers import check_trackers
from burnish.trainers import sft
from burnish.trainers.memory import MemoryWatch
from burnish.training.learner import Learner
from burnish.training.parallel.distribute import distribute
from burnish.training.parallel.join import join
from burnish.training.parallel.ranks import Ranks
from burnish.training.profile import profiled, step_to_profile


@dataclass(frozen=True)
class Outcome:
    """How far a run has come and what it left."""

    directory: Path
    is_complete: bool
    loss: float | None
    """Of the last update; None where that one had no token to learn from."""
    model: Path


@dataclass
class SftJob:
    """The parts of a supervised run; `updates` counts those made, also by the run's earlier lives."""

    config: SftConfig
    run: Run
    policy: PolicyModel
    learner: Learner
    examples: list[Example]
    updates: int = 0
    profile: int | None = None
    """The update to record with a profiler."""
    memory: MemoryWatch | None = None
    """The memory plan, to be compared with what an update held."""


def execute(
    config: SftConfig, resolved: dict[str, Any], base: Path, name: str, profile: int | None = None
) -> Outcome | None:
    """Train as far as it is not done. What can be wrong with model and data is found before the run directory is made.

    `profile` is the update to record with a profiler, or `NEXT`. Of several processes all do the same, each on its share of
    every batch; the first one owns the run, and has the outcome.
    """
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    # Only for the alphabet of a new model's tokenizer, which no option changes; a task refuses those of its demonstrations.
    plain = [source.model_copy(update={"options": {}}) for source in config.sft.data]
    ranks = join(config.parallel, pick_device(config.model.device).type == "cuda")
    # What is divided goes to its device piece by piece: no device has room for all of a model that needs several.
    where = config.model if ranks.weights is None else config.model.model_copy(update={"device": "cpu"})
    memory = planned(config, base)
    warnings = memory.check()
    policy = build_policy(where, plain, config.seed, base)
    examples, note = load(config, policy, base)
    stage = config.sft
    set_activations(policy.module, stage.activations)
    distribute(policy.module, ranks, config.parallel.offload)
    learner = Learner(policy.module, stage.optimizer, stage.updates, stage.token_budget, ranks=ranks)
    with open_run(config, resolved, name, ranks) as run:
        job = SftJob(config, run, policy, learner, examples, memory=MemoryWatch(memory, "sft"))
        checkpoint = ranks.from_first(run.resume())
        if checkpoint is not None:
            restore(job, checkpoint.path)
        if job.updates >= stage.updates:
            run.display.note(f"{run.directory.path} is complete: all {stage.updates} updates are done")
        else:
            title = f"supervised on {len(examples):,} examples: {policy.note}"
            run.display.start(title, stage.updates, job.updates)
            for text in [memory.text, *warnings, *([note] if note is not None else [])]:
                run.display.note(text)
            job.profile = step_to_profile(profile, job.updates, stage.updates) if ranks.is_first else None
            train(job)
        return outcome(job) if ranks.is_first else None


def open_run(config: SftConfig, resolved: dict[str, Any], name: str, ranks: Ranks) -> Run:
    """The run directory, new or with its past, in the hands of the first process; the others follow when it is there."""
    if not ranks.is_first:
        return Follower(Path(ranks.from_first("")), config.run)
    folder = RunDirectory.create(Path(config.run.directory), config.run.name or f"{name}-{config.seed}", dump(config))
    ranks.from_first(str(folder.path))
    return Run(folder, config.run, resolved)


def load(config: SftConfig, policy: PolicyModel, base: Path) -> tuple[list[Example], str | None]:
    """The examples that fit `sft.max_tokens` and the model's positions, and a note about those left out."""
    longest = min(config.sft.max_tokens, policy.max_positions or config.sft.max_tokens)
    examples, left_out = load_examples(
        config.sft.data, policy.tokenizer, config.template, longest, config.sft.overlong, base, config.seed
    )
    return examples, f"{left_out} examples are longer than {longest} tokens and were left out" if left_out else None


def train(job: SftJob) -> None:
    """Updates to the end, or until the user asks to stop; each is committed, some are saved, the last one always."""
    total, every = job.config.sft.updates, job.config.run.save_every
    with StopOnInterrupt(job.run.display.note) as stop:

        def after(update: int, values: dict[str, float]) -> bool:
            job.updates = update
            if job.memory is not None:
                values |= job.memory.after(job.learner.updates, values, job.run.display.note)
            if "sft/skipped" in values:
                job.run.display.note(f"update {update} was skipped: no finite gradient, or no token to learn from")
            job.run.commit(update, values, [])
            stopping = job.learner.ranks.anyone(stop.requested)  # asked once, so that a run that stops has saved
            if stopping or update == total or update % every == 0:
                job.run.checkpoint(update, lambda stage: snapshot(job, stage), None)
            if stopping or update == total:
                job.run.wait()
            return stopping

        def around(update: int) -> AbstractContextManager[None]:
            if update != job.profile:
                return nullcontext()
            return profiled(job.run.directory.path, f"update {update}", job.run.display.note)

        sft.train(job.learner, job.examples, job.config.sft, job.config.seed, after, job.updates, around)


def snapshot(job: SftJob, stage: Stage) -> Snapshot:
    """A checkpoint to be: a Hugging Face directory, plus optimizer and trainer state."""
    state = job.learner.contents(stage)
    if job.policy.part.index == 0:
        state.append(Blob("trainer.json", json.dumps({"updates": job.updates})))
    return Snapshot(job.policy.contents(stage), state, job.policy.part)


def restore(job: SftJob, folder: Path) -> None:
    """Go on from a checkpoint."""
    job.policy.load_weights(folder)
    job.learner.load(folder)
    job.updates = int(json.loads((folder / "trainer.json").read_text())["updates"])


def outcome(job: SftJob) -> Outcome:
    """What there is to say at the end, from what is on disk."""
    latest = job.run.checkpoints.latest()
    assert latest is not None  # training ends with a checkpoint, and a complete run has one
    last = read(job.run.directory.metrics)[-1]
    return Outcome(job.run.directory.path, job.updates >= job.config.sft.updates, last.get("sft/loss"), latest.path)
