"""The parts of a run, what a step did with them, and their checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from burnish.algorithms.correction import BudgetState
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.engine import Engine
from burnish.data.prompts import PromptStream
from burnish.models.policy import PolicyModel
from burnish.rollout.mismatch import MismatchEngine
from burnish.rollout.sources import SyncSource
from burnish.run.diagnosis import Facts
from burnish.run.health import Health
from burnish.run.run import Run
from burnish.trainers.correct import GapReport
from burnish.trainers.prepare import Recipe
from burnish.trainers.state import TrainerState, restored
from burnish.training.critic import Critic
from burnish.training.learner import Learner, Update
from burnish.training.reference import Reference

Validate = Callable[[int], dict[str, float]]
Demonstrations = Callable[[int], Batch]
"""The supervised rows that go with the k-th mini-batch of the run."""


@dataclass
class Job:
    """The parts of a run, put together by `trainers/build.py`."""

    config: TrainConfig
    run: Run
    policy: PolicyModel
    learner: Learner
    reference: Reference | None
    critic: Critic | None
    engine: Engine
    stream: PromptStream
    source: SyncSource
    recipe: Recipe
    validate: Validate
    state: TrainerState
    facts: Facts
    demonstrations: Demonstrations | None = None
    health: Health = field(default_factory=Health)
    """What speaks when a step's numbers leave their healthy ranges."""


@dataclass
class Learned:
    """What a step did with its rollouts: the batch in the loss (None without one), its updates, what to log of the rest."""

    batch: Batch | None = None
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)
    prepared: dict[str, float] = field(default_factory=dict)
    budget: BudgetState | None = None
    """The next state of a mismatch budget, where there is one."""
    mismatch: GapReport = field(default_factory=GapReport)
    """How far the sampler was from the trainer."""
    num_prepared: int = 0
    """Sequences before the sample filters: those the preparation's numbers are of."""


def save(job: Job, folder: Path) -> None:
    """A checkpoint: a Hugging Face directory, plus optimizer, reference, critic and trainer state."""
    job.policy.save(folder)
    for part in (job.learner, job.reference, job.critic):
        if part is not None:
            part.save(folder)
    if isinstance(job.engine, MismatchEngine):
        job.engine.save(folder)
    (folder / "trainer.json").write_text(json.dumps(asdict(job.state)))


def restore(job: Job, folder: Path) -> None:
    """Go on from a checkpoint."""
    job.policy.load_weights(folder)
    for part in (job.learner, job.reference, job.critic):
        if part is not None:
            part.load(folder)
    job.state = restored(json.loads((folder / "trainer.json").read_text()))
    job.stream.restore(job.state.stream)
    if isinstance(job.engine, MismatchEngine):
        job.engine.restore(folder)
    job.engine.load(job.state.step, ())
