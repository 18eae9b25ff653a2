"""The RL loop. Every algorithm, every place to run, every kind of rollout source goes through these lines.

    rollouts = source.next()      draw prompts, sample, score
    batch = select(...)           group filters
    batch = prepare(...)          old and reference log-probs, KL, advantages
    batch = trim(...)             sample filters
    for mini_batch in ...:        epochs and mini-batches
        learner.update(...)       exactly one optimizer step
    run.commit(...)               metrics, journal, samples, checkpoint

`examples/one_file_grpo.py` is the same loop in one plain file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.engine import Engine
from burnish.core.trajectory import pack
from burnish.data.prompts import PromptStream
from burnish.models.policy import PolicyModel
from burnish.rollout.scored import Scored
from burnish.rollout.sources import SyncSource
from burnish.run.interrupt import StopOnInterrupt
from burnish.run.run import Run
from burnish.trainers import observe
from burnish.trainers.prepare import Recipe
from burnish.training.learner import Learner, Update
from burnish.training.reference import FrozenReference

Validate = Callable[[int], dict[str, float]]


@dataclass
class TrainerState:
    """Everything that changes besides weights and optimizer; saved with every checkpoint."""

    step: int = 0
    stream: dict[str, Any] = field(default_factory=dict)


@dataclass
class Job:
    """The parts of a run, put together by `trainers/build.py`."""

    config: TrainConfig
    run: Run
    policy: PolicyModel
    learner: Learner
    reference: FrozenReference | None
    engine: Engine
    stream: PromptStream
    source: SyncSource
    recipe: Recipe
    validate: Validate
    state: TrainerState


def train(job: Job) -> bool:
    """Train from `job.state.step` on. True when all steps are done, False when the user asked to stop."""
    config, run = job.config, job.run
    total = config.training.steps
    run.display.start(f"{config.algorithm.preset} on {run.directory.name}: {job.policy.note}", total, job.state.step)
    if job.state.step == 0 and config.validation.before and config.data.validation:
        run.commit(0, job.validate(0), [])
    with StopOnInterrupt(run.display.note) as stop:
        for step in range(job.state.step + 1, total + 1):
            started = time.perf_counter()
            rollouts = job.source.next(step, run.display.phase)
            batch, updates, prepared = learn(job, rollouts)
            job.engine.load(step, ())
            job.state = TrainerState(step, job.stream.state())
            values = observe.step_values(rollouts, batch, updates, prepared, time.perf_counter() - started)
            stopping = finish_step(job, step, values, rollouts, batch, stop)
            if stopping and step < total:
                return False
    return True


def learn(job: Job, rollouts: Scored) -> tuple[Batch | None, list[Update], dict[str, float]]:
    """One batch through the algorithm and the learner, and what its preparation has to log.

    The batch is None when there was nothing to compare; whenever no update is made a note says why.
    """
    training, recipe = job.config.training, job.recipe
    usable = [t for t in rollouts.trajectories if t.reward is not None]
    if not usable:
        job.run.display.note(
            f"step {job.state.step + 1}: no update, not one of {len(rollouts.trajectories)} samples could be scored"
        )
        return None, [], {}
    job.run.display.phase("learning")
    packed = pack(usable).to(job.learner.device)
    batch = recipe.select(packed)
    if batch.num_sequences == 0:
        job.run.display.note(f"step {job.state.step + 1}: no update, {observe.why_no_signal(packed)}")
        return None, [], {}
    whole, prepared = recipe.prepare(batch, job.learner, job.reference)
    batch = recipe.trim(whole)
    if batch.num_sequences == 0:
        job.run.display.note(f"step {job.state.step + 1}: no update, {observe.why_nothing_left(whole)}")
    updates = []
    for mini_batch in recipe.mini_batches(batch, training.mini_batches, training.epochs):
        updates.append(job.learner.update(mini_batch, recipe.loss))
        if updates[-1].skipped:
            job.run.display.note(f"step {job.state.step + 1}: no update, {updates[-1].skipped}")
    return batch, updates, prepared


def finish_step(
    job: Job, step: int, values: dict[str, Any], rollouts: Scored, batch: Batch | None, stop: StopOnInterrupt
) -> bool:
    """Validation when it is due, samples, metrics and journal, a checkpoint when it is due.

    Whether the user asked to stop is read once, so that a run that stops has saved; returns what was read.
    """
    config, run = job.config, job.run
    due = config.validation.every and step % config.validation.every == 0
    score = None
    if due or step == config.training.steps:
        measured = job.validate(step)
        values |= measured
        score = measured.get(f"validation/{next(iter(config.validation.modes), None)}/accuracy")
    if step % config.run.samples_every == 0 or step in (1, config.training.steps):
        run.samples(step, "train", observe.sample_rows(rollouts, batch, job.policy.tokenizer))
    for failed in rollouts.failed[:1]:
        run.display.note(
            f"step {step}: {len(rollouts.failed)} samples could not be scored and are not used; first: {failed.error}"
        )
    run.commit(step, values, observe.used_ids(rollouts, batch))
    stopping = stop.requested
    if stopping or step == config.training.steps or score is not None or step % config.run.save_every == 0:
        run.checkpoint(step, lambda folder: save(job, folder), score)
    return stopping


def save(job: Job, folder: Path) -> None:
    """A checkpoint: a Hugging Face directory, plus optimizer and trainer state."""
    job.policy.save(folder)
    job.learner.save(folder)
    (folder / "trainer.json").write_text(json.dumps({"step": job.state.step, "stream": job.state.stream}))


def restore(job: Job, folder: Path) -> None:
    """Go on from a checkpoint."""
    job.policy.load_weights(folder)
    job.learner.load(folder)
    job.state = TrainerState(**json.loads((folder / "trainer.json").read_text()))
    job.stream.restore(job.state.stream)
    job.engine.load(job.state.step, ())
