"""What every step asks of the source of rollouts, and the source that a config names."""

from __future__ import annotations

import math

from burnish.config.schema import TrainConfig
from burnish.config.slots import Slot
from burnish.config.slots.advantages import SpoChainAdvantage, SpoTreeAdvantage
from burnish.config.source import Ahead, Async
from burnish.data.prompts import PromptStream
from burnish.rewards.rewards import Rewards
from burnish.rollout.ahead import AheadSource
from burnish.rollout.asynchronous import AsyncSource
from burnish.rollout.chains import Chain
from burnish.rollout.driver import Branching, Driver
from burnish.rollout.measure import sampling_options
from burnish.rollout.replay import ReplaySource, ReplayStore
from burnish.rollout.sources import RolloutPlan, Source, SyncSource
from burnish.rollout.trees import Tree
from burnish.run.run import Run


def rollout_plan(config: TrainConfig, eos_ids: tuple[int, ...], step: int) -> RolloutPlan:
    """What a step asks for at once."""
    settings = config.rollout.at(step)
    return RolloutPlan(
        prompts=settings.prompts * config.algorithm.refill.oversample,
        n=settings.n,
        sampling=sampling_options(settings, eos_ids),
        greedy=bool(config.algorithm.needs("greedy")),
        branching=branching(config.algorithm.advantage),
    )


def branching(advantage: Slot) -> Branching | None:
    """What an advantage asks of the samples besides being samples."""
    if isinstance(advantage, SpoChainAdvantage):
        return Chain(advantage.below, advantage.every, advantage.rollouts)
    return Tree(tuple(advantage.branches), advantage.segment) if isinstance(advantage, SpoTreeAdvantage) else None


def build_replay(config: TrainConfig) -> ReplayStore | None:
    """The groups of a run that may come back, where any may."""
    return None if config.algorithm.replay is None else ReplayStore(config.algorithm.replay, config.seed)


def with_replay(config: TrainConfig, source: Source, store: ReplayStore | None) -> Source:
    """A source whose steps also get groups back."""
    replay = config.algorithm.replay
    if store is None or replay is None:
        return source
    return ReplaySource(source, store, lambda step: math.ceil(replay.share * config.rollout.at(step).prompts))


def build_source(config: TrainConfig, run: Run, stream: PromptStream, driver: Driver, rewards: Rewards) -> Source:
    """The source of a run's new rollouts."""
    eos_ids, kind = driver.tokenizer.eos_ids, config.rollout.source

    def plans(step: int) -> RolloutPlan | None:
        return rollout_plan(config, eos_ids, step) if step <= config.training.steps else None

    if isinstance(kind, Ahead):
        return AheadSource(stream, driver, rewards, run.journal, plans, run.display.phase, run.display.note)
    if isinstance(kind, Async):
        limits = kind.max_staleness, kind.deadline_s
        return AsyncSource(stream, driver, rewards, run.journal, plans, *limits, run.display.note)
    return SyncSource(stream, driver, rewards, run.journal)
