"""The parts of a run, what a step did with them, and their checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from burnish.algorithms.correction.budget import BudgetState
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.engine import Engine
from burnish.data.prompt_stream import PromptStream
from burnish.inference.engine_wrappers import MismatchEngine
from burnish.models.policy import PolicyModel
from burnish.rollout.replay import ReplayStore
from burnish.rollout.sync_source import RolloutSource
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import BytesFile, Snapshot
from burnish.run.health.mismatch_causes import HealthContext
from burnish.run.health.monitor import HealthMonitor
from burnish.run.run import Run
from burnish.trainers.mismatch import GapReport
from burnish.trainers.performance import MemoryPlanCheck
from burnish.trainers.pipeline import AlgorithmPipeline
from burnish.trainers.process_rewards import ProcessRewards
from burnish.trainers.state import TrainerState, state_from_checkpoint
from burnish.training.interfaces import AnyCritic, AnyLearner, AnyProcessRewardModel, AnyReference
from burnish.training.learner import Update

CheckpointedPart = AnyLearner | AnyReference | AnyCritic | AnyProcessRewardModel
Validate = Callable[[int], dict[str, float]]
ImitationBatch = Callable[[int], Batch]
"""The supervised rows that go with the k-th mini-batch of the run."""


@dataclass
class TrainContext:
    """The parts of a run, put together by `trainers/assembly.py`."""

    config: TrainConfig
    run: Run
    policy: PolicyModel
    learner: AnyLearner
    reference: AnyReference | None
    critic: AnyCritic | None
    engine: Engine
    stream: PromptStream
    source: RolloutSource
    recipe: AlgorithmPipeline
    validate: Validate
    state: TrainerState
    facts: HealthContext
    demonstrations: ImitationBatch | None = None
    process: ProcessRewards | None = None
    """What rewards single tokens, and learns to."""
    health: HealthMonitor = field(default_factory=HealthMonitor)
    """What speaks when a step's numbers leave their healthy ranges."""
    profile: int | None = None
    """The step to record with a profiler."""
    memory: MemoryPlanCheck | None = None
    """The memory plan, to be compared with what a step held."""
    has_accuracy: bool = False
    """Whether the reward tells correct from wrong answers, as far as is known: then the accuracy is the default of `run.best_by`."""
    replay: ReplayStore | None = None
    """Groups that may come back to later steps, where any may."""

    @property
    def learners(self) -> list[AnyLearner]:
        """The policy's, and those of the critic and the process reward model where there are any."""
        others = self.critic, self.process.model if self.process is not None else None
        return [self.learner, *(part.learner for part in others if part is not None)]

    @property
    def parts(self) -> list[CheckpointedPart]:
        """What a checkpoint holds of weights and optimizers beside the policy's own."""
        process = self.process.model if self.process is not None else None
        return [part for part in (self.learner, self.reference, self.critic, process) if part is not None]


@dataclass
class StepResult:
    """What a step did with its rollouts: the batch in the loss (None without one), its updates, what to log of the rest."""

    batch: Batch | None = None
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)
    prepared: dict[str, float] = field(default_factory=dict)
    budget: BudgetState | None = None
    """The next state of a mismatch budget, where there is one."""
    unfinished: Sequence[int] | None = None
    """Trajectories that later steps may learn other parts of, by their place in the batch that was prepared; None where all are
    learnt from as a whole."""
    mismatch: GapReport = field(default_factory=GapReport)
    """How far the sampler was from the trainer."""
    trainer_logp: Tensor | None = None
    """[N] the trainer's log-probs of the batch before its first update, nan where not known; None where none are."""
    num_prepared: int = 0
    """Sequences that the policy sampled, before the sample filters: those the preparation's numbers are of."""
    reward: float | None = None
    """The mean reward of those that are new, as the shapers left it: what a baseline of earlier steps is the mean of."""


def snapshot(job: TrainContext, stage: TensorStaging) -> Snapshot:
    """A checkpoint to be: a Hugging Face directory, plus optimizer, reference, critic, process reward model and trainer state."""
    state = [content for part in job.parts for content in part.contents(stage)]
    state += job.engine.contents(stage) if isinstance(job.engine, MismatchEngine) else []
    if job.policy.part.index == 0:
        state.append(BytesFile("trainer.json", json.dumps(asdict(job.state))))
        state += job.replay.contents() if job.replay is not None else []
    return Snapshot(job.policy.contents(stage), state, job.policy.part)


def restore(job: TrainContext, folder: Path) -> None:
    """Go on from a checkpoint."""
    job.policy.load_weights(folder)
    for part in job.parts:
        part.load(folder)
    if job.replay is not None:
        job.replay.load(folder)
    job.state = state_from_checkpoint(json.loads((folder / "trainer.json").read_text()))
    job.stream.restore(job.state.stream)
    if isinstance(job.engine, MismatchEngine):
        job.engine.restore(folder)
    job.engine.load(job.state.step, ())
    job.source.restore(job.state.waiting, job.state.step)
