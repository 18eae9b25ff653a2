"""The parts of an RL run, the result of a step, and the checkpoint that holds them."""

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
from burnish.environments.host import EnvironmentHost
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
from burnish.trainers.scored_rollouts import ScoredRollouts
from burnish.trainers.state import TrainerState, state_from_checkpoint
from burnish.trainers.teacher_columns import AddColumns
from burnish.trainers.while_scoring import WhileScoring
from burnish.training.interfaces import AnyCritic, AnyLearner, AnyProcessRewardModel, AnyReference
from burnish.training.learner import Update

CheckpointedPart = AnyLearner | AnyReference | AnyCritic | AnyProcessRewardModel
Validate = Callable[[int], dict[str, float]]
"""Measures the policy after a step and returns the metrics."""
ImitationBatch = Callable[[int], Batch]
"""Returns the supervised examples for the k-th mini-batch of the run."""


@dataclass
class TrainContext:
    """The parts of an RL run, built by `trainers/assembly.py`."""

    config: TrainConfig
    run: Run
    policy: PolicyModel
    learner: AnyLearner
    reference: AnyReference | None
    critic: AnyCritic | None
    engine: Engine
    stream: PromptStream
    source: RolloutSource
    scored: ScoredRollouts
    """Shows rollouts on the live page as they are scored."""
    pipeline: AlgorithmPipeline
    validate: Validate
    state: TrainerState
    health_context: HealthContext
    """Facts of the config that a diagnosis may name."""
    imitation: ImitationBatch | None = None
    process: ProcessRewards | None = None
    """The process reward model, which rewards single tokens and learns online."""
    health: HealthMonitor = field(default_factory=HealthMonitor)
    """Warns when metrics leave their healthy ranges."""
    profile_step: int | None = None
    """The step to record with a profiler."""
    memory_check: MemoryPlanCheck | None = None
    """Compares the memory plan with the measured peak."""
    has_accuracy: bool = False
    """Whether the reward is known to tell correct from wrong answers. The accuracy is then the default of `run.best_by`."""
    replay: ReplayStore | None = None
    """Groups that later steps may learn from again."""
    environments: EnvironmentHost | None = None
    """Runs environments on messages, some in worker processes."""
    roles: tuple[str, ...] = ()
    """Players of a game of several: each prompt gives one group of samples for each role."""
    while_scoring: WhileScoring | None = None
    """What is done while slow rewards are computed; None if the rewards are fast, or the source samples during the updates."""
    add_columns: Sequence[AddColumns] = ()
    """Add the columns that need the rows of a step's prompts: those of teachers, and how likely known answers are."""

    @property
    def learners(self) -> list[AnyLearner]:
        """The learners of the policy, the critic and the process reward model."""
        others = self.critic, self.process.model if self.process is not None else None
        return [self.learner, *(part.learner for part in others if part is not None)]

    @property
    def parts(self) -> list[CheckpointedPart]:
        """The parts that have weights or an optimizer in a checkpoint besides the policy's own files."""
        process = self.process.model if self.process is not None else None
        return [part for part in (self.learner, self.reference, self.critic, process) if part is not None]


@dataclass
class StepResult:
    """The batch, updates and metrics of one training step."""

    batch: Batch | None = None
    """The batch in the loss; None if there was nothing to learn from."""
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the pipeline's steps, and of the policy before its first update."""
    budget: BudgetState | None = None
    """The next state of a mismatch budget."""
    role_baselines: dict[str, float] | None = None
    """The baselines of the roles after the step, for advantage rae; None if nothing was learnt from."""
    unfinished: Sequence[int] | None = None
    """Indices into the packed trajectories of those with untrained tree edges; None if answers are no trees."""
    mismatch: GapReport = field(default_factory=GapReport)
    """The gap between sampler and trainer."""
    trainer_logp: Tensor | None = None
    """[N] the trainer's log-probs of the batch before the first update, nan if unknown; None if all are unknown."""
    entropy: Tensor | None = None
    """[N] the policy's entropies before the first update, nan where they were not computed; None if nowhere."""
    num_sampled: int = 0
    """Sequences that the policy sampled, before the sample filters."""
    reward_mean: float | None = None
    """Mean shaped reward of the new samples, which the moving-average baseline follows."""


def snapshot(context: TrainContext, stage: TensorStaging) -> Snapshot:
    """The contents of a checkpoint: a Hugging Face directory, plus the state of all parts and of the trainer."""
    state = [content for part in context.parts for content in part.contents(stage)]
    state += context.engine.contents(stage) if isinstance(context.engine, MismatchEngine) else []
    if context.policy.part.index == 0:
        state.append(BytesFile("trainer.json", json.dumps(asdict(context.state))))
        state += context.replay.contents() if context.replay is not None else []
    return Snapshot(context.policy.contents(stage), state, context.policy.part)


def restore(context: TrainContext, folder: Path) -> None:
    """Resume from a checkpoint."""
    context.policy.load_weights(folder)
    for part in context.parts:
        part.load(folder)
    if context.replay is not None:
        context.replay.load(folder)
    context.state = state_from_checkpoint(json.loads((folder / "trainer.json").read_text()))
    context.stream.restore(context.state.stream)
    if isinstance(context.engine, MismatchEngine):
        context.engine.restore(folder)
    context.engine.load(context.state.step, ())
    context.source.restore(context.state.waiting, context.state.step)
