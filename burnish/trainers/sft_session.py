"""One supervised run from start to end, or from where it was: run directory, updates, checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.config.load import dump
from burnish.config.schema import SftConfig
from burnish.controller.roles import build_policy
from burnish.data.supervised import Example, load_examples
from burnish.models.policy import PolicyModel
from burnish.run.directory import RunDirectory
from burnish.run.interrupt import StopOnInterrupt
from burnish.run.metrics import read
from burnish.run.run import Run
from burnish.run.trackers import check_trackers
from burnish.trainers import sft
from burnish.training.learner import Learner


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


def execute(config: SftConfig, resolved: dict[str, Any], base: Path, name: str) -> Outcome:
    """Train as far as it is not done. What can be wrong with model and data is found before the run directory is made."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    # Only for the alphabet of a new model's tokenizer, which no option changes; a task refuses those of its demonstrations.
    plain = [source.model_copy(update={"options": {}}) for source in config.sft.data]
    policy = build_policy(config.model, plain, config.seed, base)
    examples, note = load(config, policy, base)
    stage = config.sft
    learner = Learner(policy.module, stage.optimizer, stage.updates, stage.token_budget)
    folder = RunDirectory.create(Path(config.run.directory), config.run.name or f"{name}-{config.seed}", dump(config))
    with Run(folder, config.run, resolved) as run:
        job = SftJob(config, run, policy, learner, examples)
        checkpoint = run.resume()
        if checkpoint is not None:
            restore(job, checkpoint.path)
        if job.updates >= stage.updates:
            run.display.note(f"{folder.path} is complete: all {stage.updates} updates are done")
        else:
            title = f"supervised on {len(examples):,} examples: {policy.note}"
            run.display.start(title, stage.updates, job.updates)
            if note is not None:
                run.display.note(note)
            train(job)
        return outcome(job)


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
            if "sft/skipped" in values:
                job.run.display.note(f"update {update} was skipped: no finite gradient, or no token to learn from")
            job.run.commit(update, values, [])
            if stop.requested or update == total or update % every == 0:
                job.run.checkpoint(update, lambda folder: save(job, folder), None)
            return stop.requested

        sft.train(job.learner, job.examples, job.config.sft, job.config.seed, after, job.updates)


def save(job: SftJob, folder: Path) -> None:
    """A checkpoint: a Hugging Face directory, plus optimizer and trainer state."""
    job.policy.save(folder)
    job.learner.save(folder)
    (folder / "trainer.json").write_text(json.dumps({"updates": job.updates}))


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
