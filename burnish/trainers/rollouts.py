"""What every step asks of the source of rollouts, and the source that a config names."""

from __future__ import annotations

from burnish.config.schema import TrainConfig
from burnish.config.source import Ahead, Async
from burnish.data.prompts import PromptStream
from burnish.rewards.rewards import Rewards
from burnish.rollout.ahead import AheadSource
from burnish.rollout.asynchronous import AsyncSource
from burnish.rollout.driver import Driver
from burnish.rollout.measure import sampling_options
from burnish.rollout.sources import RolloutPlan, Source, SyncSource
from burnish.run.run import Run


def rollout_plan(config: TrainConfig, eos_ids: tuple[int, ...], step: int) -> RolloutPlan:
    """What a step asks for at once."""
    settings = config.rollout.at(step)
    return RolloutPlan(
        prompts=settings.prompts * config.algorithm.refill.oversample,
        n=settings.n,
        sampling=sampling_options(settings, eos_ids),
        greedy=bool(config.algorithm.needs("greedy")),
    )


def build_source(config: TrainConfig, run: Run, stream: PromptStream, driver: Driver, rewards: Rewards) -> Source:
    """The source of a run."""
    eos_ids, kind = driver.tokenizer.eos_ids, config.rollout.source

    def plans(step: int) -> RolloutPlan | None:
        return rollout_plan(config, eos_ids, step) if step <= config.training.steps else None

    if isinstance(kind, Ahead):
        return AheadSource(stream, driver, rewards, run.journal, plans, run.display.phase, run.display.note)
    if isinstance(kind, Async):
        limits = kind.max_staleness, kind.deadline_s
        return AsyncSource(stream, driver, rewards, run.journal, plans, *limits, run.display.note)
    return SyncSource(stream, driver, rewards, run.journal)
