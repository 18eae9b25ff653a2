"""Rollouts with their rewards: generation and scoring overlap, and the result is in a fixed order.

Used by the training source and by every measurement, so that both see rewards the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompts import Draw
from burnish.rewards.rewards import Rewards
from burnish.rewards.types import Score, ScoreRequest
from burnish.rollout.driver import Driver

Progress = Callable[[str], None]
MESSAGE = 64  # trajectories sent to the reward workers at once: fewer, larger messages


@dataclass(frozen=True)
class Scored:
    """Trajectories in the order of the draws and samples, with what it took."""

    draws: list[Draw]
    trajectories: list[Trajectory]
    rollout_s: float
    reward_s: float
    """Seconds spent waiting for rewards after the last completion."""

    @property
    def num_tokens(self) -> int:
        return sum(t.num_actions for t in self.trajectories)

    @property
    def failed(self) -> list[Trajectory]:
        """Those whose scorer failed: without a reward, kept out of the loss and of group statistics."""
        return [t for t in self.trajectories if t.reward is None]


@dataclass
class Scoring:
    """One batch of rollouts on its way: `generate`, then `collect`."""

    driver: Driver
    rewards: Rewards
    draws: Sequence[Draw]
    progress: Progress

    def generate(self, n: int, sampling: SamplingOptions, stream: str) -> list[Trajectory]:
        """All trajectories in order; the reward of each starts as soon as it ends."""
        order = {(d.prompt.row.id, d.visit): i for i, d in enumerate(self.draws)}
        total, found = len(self.draws) * n, list[Trajectory]()
        for trajectory in self.driver.run(self.draws, n, sampling, stream):
            found.append(trajectory)
            if len(found) % MESSAGE == 0:
                self.submit(found[-MESSAGE:])
            self.progress(f"rollout {len(found)}/{total}")
        self.submit(found[len(found) - len(found) % MESSAGE :])
        return sorted(found, key=lambda t: (order[t.prompt_id, t.visit], t.sample))

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Send trajectories to be scored, except those whose environment gave the reward itself."""
        draws = {(d.prompt.row.id, d.visit): d for d in self.draws}
        self.rewards.submit([_request(t, draws[t.prompt_id, t.visit]) for t in trajectories if t.reward is None])

    def collect(self, trajectories: Sequence[Trajectory]) -> None:
        """Wait for the scores and write them into the trajectories."""
        by_id = {t.id: t for t in trajectories}
        while self.rewards.pending:
            for score in self.rewards.poll(None):
                _apply(by_id[score.id], score)
            self.progress(f"scoring, {self.rewards.pending} left")


def rollout_and_score(
    driver: Driver,
    rewards: Rewards,
    draws: Sequence[Draw],
    n: int,
    sampling: SamplingOptions,
    stream: str,
    progress: Progress,
) -> Scored:
    """`n` scored trajectories of each draw."""
    scoring = Scoring(driver, rewards, draws, progress)
    started = time.perf_counter()
    trajectories = scoring.generate(n, sampling, stream)
    generated = time.perf_counter()
    scoring.collect(trajectories)
    return Scored(list(draws), trajectories, generated - started, time.perf_counter() - generated)


def _request(trajectory: Trajectory, draw: Draw) -> ScoreRequest:
    """What the reward is told about a trajectory."""
    row = draw.prompt.row
    return ScoreRequest(
        id=trajectory.id,
        prompt=row.prompt,
        completion=trajectory.completion,
        data_source=row.data_source,
        answer=row.answer,
        extra=row.extra,
        truncated=trajectory.truncated,
    )


def _apply(trajectory: Trajectory, score: Score) -> None:
    trajectory.reward, trajectory.accuracy = score.reward, score.accuracy
    trajectory.parts, trajectory.error = dict(score.parts), score.error
    trajectory.metadata["timed_out"] = score.timed_out
