"""The source that samples one step ahead: its weights are exactly one step old, and it resumes exactly."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from burnish.algorithms.curriculum.spec import PrioritisedCurriculum
from burnish.config.data import Data, Source
from burnish.config.environment import Environment
from burnish.config.errors import UserError
from burnish.core.engine import Completion, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptStream
from burnish.environments.registry import environment_factory
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rollout.ahead_source import AheadSource
from burnish.rollout.async_source import staleness_metrics
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import RolloutBatch
from burnish.rollout.sync_source import RolloutPlan, SyncSource
from burnish.run.journal import Journal
from tests.inference.slow_engine import SlowEngine

TOKENIZER = Tokenizer.from_characters("0123456789>")
SOURCES = [Source(task="sort_digits", limit=30, options={"min_digits": 2, "max_digits": 3})]
PLAN = RolloutPlan(prompts=3, n=2, sampling=SamplingOptions(max_tokens=12, stop_tokens=(1,)))
STEPS = 5


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
        return [Score(r.id, len(r.completion) / 10, float(len(r.completion) > 3), {}) for r in done]


class Life:
    """One life of a run, with a curriculum that watches every answer."""

    def __init__(self, folder: Path, engine: SlowEngine | None = None, kind: type[SyncSource] = AheadSource) -> None:
        self.engine, self.notes = engine or SlowEngine(), list[str]()
        runner = RolloutRunner(cast(Any, self.engine), environment_factory(Environment(), TOKENIZER), TOKENIZER, 3)
        curriculum = PrioritisedCurriculum(warmup_steps=1)
        self.stream = PromptStream(SOURCES, TOKENIZER, Data(train=SOURCES), 3, curriculum=curriculum)
        self.journal = Journal(folder / "journal")
        parts = self.stream, runner, cast(Rewards, Judge()), self.journal
        ahead = (self.plans, lambda text: None, self.notes.append) if kind is AheadSource else ()
        self.source = kind(*parts, *ahead)

    def plans(self, step: int) -> RolloutPlan | None:
        return PLAN if step <= STEPS else None

    def step(self, number: int, rounds: int = 1) -> RolloutBatch:
        parts = [self.source.next(number, PLAN, lambda text: None, k) for k in range(rounds)]
        self.source.start_next(number + 1)
        self.source.load(number)
        self.stream.observe([t for scored in parts for t in scored.trajectories])
        return parts[0] if rounds == 1 else parts[0].joined(parts[1])

    def saved(self) -> str:
        return json.dumps([self.stream.state(), self.source.pending_draws()])

    def restored(self, step: int, saved: str) -> None:
        state, tickets = json.loads(saved)
        self.journal.rewind(step)
        self.stream.restore(state)
        self.engine.load(step, ())
        self.source.restore(tickets, step)


def told(trajectories: Sequence[Trajectory]) -> list[Any]:
    return [(t.id, t.completion, t.reward, t.sequences[0].version.tolist()) for t in trajectories]


def ages(scored: RolloutBatch, step: int) -> set[int]:
    return {int(a) for t in scored.trajectories for a in step - 1 - t.sequences[0].version[t.sequences[0].action_mask]}


class Gated(SlowEngine):
    """Samples the next batch only once `learning` is set, and sets `sampled` when it has."""

    def __init__(self) -> None:
        super().__init__()
        self.learning, self.sampled = threading.Event(), threading.Event()

    def stream(self) -> Iterator[Completion]:
        if self.version == 1:
            assert self.learning.wait(600)
        yield from super().stream()
        if self.version == 1:
            self.sampled.set()


def test_the_next_batch_is_sampled_while_this_one_is_learnt(tmp_path: Path) -> None:
    engine = Gated()
    life = Life(tmp_path, engine)
    life.step(1)
    life.source.next(2, PLAN, lambda text: None)
    life.source.start_next(3)
    engine.learning.set()  # the learner is at work, and does not go on before the batch of step 3 is there
    assert engine.sampled.wait(600)
    life.source.load(2)
    assert engine.users == {"MainThread", "rollouts of step 2", "rollouts of step 3"}


def test_every_token_is_exactly_one_step_old_and_runs_are_alike(tmp_path: Path) -> None:
    lives = [Life(tmp_path / str(k), SlowEngine(0.001 * k)) for k in range(2)]
    for step in range(1, STEPS + 1):
        one, other = (life.step(step) for life in lives)
        assert told(one.trajectories) == told(other.trajectories)
        assert ages(one, step) == ({0} if step == 1 else {1})
        found = lives[0].source.metrics(one, step - 1)
        assert (found["staleness/mean"], found["staleness/mixed"]) == (float(step > 1), 0.0)
    assert lives[0].source.pending_draws() == [], "nothing is drawn for a step that never comes"


def test_later_rounds_are_sampled_with_the_weights_of_the_moment(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.step(1, rounds=2)
    scored = life.step(2, rounds=2)
    assert [sorted({int(v) for v in t.sequences[0].version if v >= 0}) for t in scored.trajectories] == [[0]] * 6 + [[1]] * 6  # fmt: skip
    groups = [f"{d.prompt.row.id}#{d.visit}" for d in scored.draws]
    assert len(set(groups)) == 6


@pytest.mark.parametrize("checkpoint", [0, 1, 3])
@pytest.mark.parametrize("killed", ["before the batch is there", "before it is used", "steps later"])
def test_a_second_life_ends_as_one_that_was_never_broken(tmp_path: Path, checkpoint: int, killed: str) -> None:
    unbroken = Life(tmp_path / "unbroken")
    expected = [told(unbroken.step(step).trajectories) for step in range(1, STEPS + 1)]
    first = Life(tmp_path)
    saved = first.saved()
    for step in range(1, checkpoint + 1):
        first.step(step)
        saved = first.saved()
    if killed == "before the batch is there":
        first.source.next(checkpoint + 1, PLAN, lambda text: None)
        first.source.start_next(checkpoint + 2)
        first.source.close()
    elif killed == "steps later":
        first.step(checkpoint + 1)
    second = Life(tmp_path)
    second.restored(checkpoint, saved)
    assert [told(second.step(step).trajectories) for step in range(checkpoint + 1, STEPS + 1)] == expected[checkpoint:]
    assert second.notes == []
    assert second.stream.state() == unbroken.stream.state()


def test_a_batch_that_the_journal_has_lost_is_made_again_and_said(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.step(1)
    saved = first.saved()
    (tmp_path / "journal" / "completed-000002.safetensors").unlink()
    second = Life(tmp_path)
    second.restored(1, saved)
    assert "are missing in the journal" in second.notes[0]
    scored = second.step(2)
    assert ages(scored, 2) == {0}
    assert [t.id for t in scored.trajectories] == [t.id for t in first.source.next(2, PLAN, lambda text: None).trajectories]  # fmt: skip


def test_an_error_of_the_engine_is_raised_where_the_trainer_waits(tmp_path: Path) -> None:
    class Broken(SlowEngine):
        def stream(self) -> Iterator[Completion]:
            if threading.current_thread() is not threading.main_thread():
                raise UserError("the engine is broken")
            return super().stream()

    life = Life(tmp_path, Broken())
    with pytest.raises(UserError, match="the engine is broken"):
        life.step(1)


def test_what_was_drawn_ahead_is_not_forgotten_by_a_run_without(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.step(1)
    sync = Life(tmp_path, kind=SyncSource)
    with pytest.raises(UserError, match="3 prompts were drawn ahead"):
        sync.restored(1, first.saved())


def test_staleness_counts_tokens() -> None:
    def sample(versions: list[int]) -> Trajectory:
        from burnish.core.trajectory import chain_nodes

        column = np.array(versions, dtype=np.int32)
        nodes = chain_nodes(np.zeros(len(versions), dtype=np.int64), column >= 0, np.zeros(len(versions), dtype=np.float32), column)  # fmt: skip
        return Trajectory("p", 0, 0, nodes, "stop", "")

    assert staleness_metrics([sample([-1, 3, 3, 4]), sample([-1, 4]), sample([-1])], 5) == {
        "staleness/mean": 1.5,
        "staleness/max": 2.0,
        "staleness/mixed": 0.5,
        "staleness/share/1": 0.5,
        "staleness/share/2": 0.5,
    }
    assert staleness_metrics([sample([-1])], 5) == {}


def test_failed_scores_of_the_next_batch_are_computed_again(tmp_path: Path) -> None:
    first = Life(tmp_path)
    score = Judge.poll
    first.step(1)
    saved = first.saved()
    first.source.rewards.poll = lambda timeout_s: [
        replace(s, reward=None, error="ill") for s in score(cast(Judge, first.source.rewards), timeout_s)
    ]  # type: ignore[method-assign]
    assert first.step(2).failed == []  # it was made and scored in step 1
    assert len(first.source.next(3, PLAN, lambda text: None).failed) == 6
    second = Life(tmp_path)
    second.restored(1, saved)
    second.step(2)
    again = second.step(3)
    assert again.failed == []
    assert second.engine.version == 3
    assert ages(again, 3) == {1}
