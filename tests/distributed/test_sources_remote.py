"""The asynchronous source over engines that are workers: samples go on elsewhere under new weights, whoever dies meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptStream
from burnish.distributed.roles import build_runner
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rollout.async_source import AsyncSource
from burnish.rollout.sync_source import RolloutPlan
from burnish.run.journal import Journal
from tests.distributed.toy_run import Parts, learn, parts_of

STEPS = 4
PLAN = RolloutPlan(prompts=3, n=2, sampling=SamplingOptions(max_tokens=20))


class Judge:
    """Stands where the rewards stand."""

    def __init__(self) -> None:
        self.asked: list[ScoreRequest] = []

    @property
    def pending(self) -> int:
        return len(self.asked)

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self.asked += requests

    def poll(self, timeout_s: float | None) -> list[Score]:
        done, self.asked = self.asked, []
        return [Score(request.id, float(len(request.completion)), 1.0, {}) for request in done]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    made = parts_of(tmp_path, "rollout.source={name: async, max_staleness: 2}", "placement.layout=split")
    made.engine.load(0, ())
    return made


@pytest.fixture
def source(parts: Parts, tmp_path: Path) -> Iterator[AsyncSource]:
    config = parts.config
    runner = build_runner(config, parts.trainer.policy, cast(Any, parts.engine), tmp_path)
    stream = PromptStream(config.data.train, runner.tokenizer, config.data, config.seed)

    def plans(step: int) -> RolloutPlan | None:
        return PLAN if step <= STEPS else None

    journal = Journal(tmp_path / "journal")
    made = AsyncSource(stream, runner, cast(Rewards, Judge()), journal, plans, 2, 60.0, parts.notes.append)
    yield made
    made.close()


def versions(trajectory: Trajectory) -> list[int]:
    (sequence,) = trajectory.sequences
    found: list[int] = sequence.version[sequence.action_mask].tolist()
    return found


def test_samples_go_on_under_the_weights_of_the_moment_and_none_is_lost(parts: Parts, source: AsyncSource) -> None:
    used: list[str] = []
    for step in range(1, STEPS + 1):
        scored = source.next(step, PLAN, lambda text: None)
        for trajectory in scored.trajectories:
            seen = versions(trajectory)
            assert 0 <= step - 1 - min(seen) <= 2
            assert seen == sorted(seen)
        used += [t.id for t in scored.trajectories]
        if step == 2:
            parts.backend.dead.add(1)  # whatever it has is gone
        learn(parts.trainer)
        source.load(step)
        assert parts.engine.num_unfinished == 0
    assert len(set(used)) == len(used) == STEPS * PLAN.prompts * PLAN.n
    assert source.groups == {}
    assert parts.backend.restarted == [1]
    assert "engine 1 is started again" in parts.notes[0]


def test_samples_are_stopped_where_they_are_and_keep_their_tokens(parts: Parts, source: AsyncSource) -> None:
    reached = [hold(worker.thread.engine) for worker in parts.backend.workers]
    source._fill(1, PLAN, 0)
    source.thread.run()
    assert all(event.wait(30) for event in reached)  # every sample has five tokens, and no more without leave
    learn(parts.trainer)
    source.load(1)
    stopped = list(source.in_flight.paused)
    assert len(stopped) == 2 * PLAN.prompts * PLAN.n
    assert all(one.num_partial >= 5 and set(one.turn.version) == {0} for one in stopped)
    scored = source.next(2, PLAN, lambda text: None)
    assert all(set(versions(t)) == {0, 1} for t in scored.trajectories)


def hold(engine: Any) -> threading.Event:
    """Make an engine with its first weights wait after five steps until it is interrupted; the event says that it does."""
    reached, step, before = threading.Event(), engine._decode, engine.stats.decode_steps

    def holding() -> Any:
        while engine.version == 0 and engine.stats.decode_steps >= before + 5 and not engine._interrupted:
            reached.set()
            time.sleep(0.001)
        return step()

    engine._decode, engine._steps_at_once = holding, lambda: 1
    return reached
