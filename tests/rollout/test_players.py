"""Games of several players in every rollout source: each player that had a turn has a trajectory, also after a stop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from burnish.config.data import Data, Template
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.trajectory import PLAYERS, Trajectory, pack
from burnish.data.prompt_stream import PromptStream
from burnish.environments.base import Answer, End, Environment, Episode, Observation
from burnish.environments.dialogue import ChatRenderer
from burnish.environments.host import EnvironmentHost, EnvironmentKind
from burnish.rewards.scoring import Rewards
from burnish.rollout.ahead_source import AheadSource
from burnish.rollout.async_source import AsyncSource, PendingGroup
from burnish.rollout.runner import RolloutRunner, RolloutStopped
from burnish.rollout.scoring import RolloutBatch
from burnish.rollout.sync_source import RolloutPlan, SyncSource
from burnish.run.journal import Journal
from tests.inference.slow_engine import SlowEngine
from tests.rollout.test_async_source import SOURCES, TOKENIZER, Judge

PLAN = RolloutPlan(prompts=3, n=4, sampling=SamplingOptions(max_tokens=12, stop_tokens=(1,)))
ROLES = ("first", "second")


class Duel(Environment):
    """The second player has a turn unless the first answer is short. Every second game leaves the reward to the config."""

    async def start(self, episode: Episode) -> Observation:
        self.is_scored = episode.sample % 2 == 0
        return Observation(messages=({"role": "user", "content": "1>"},), role="first")

    async def step(self, answer: Answer) -> Observation | End:
        if answer.turn == 0 and answer.num_tokens > 3:
            return Observation(messages=({"role": "user", "content": "2>"},), role="second")
        return End(rewards={"first": 1.0, "second": -1.0}) if self.is_scored else End()


class Turns(SlowEngine):
    """A later turn goes on behind other tokens than its own, so its past is not checked."""

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.rows[request.id] = request, [], []


class Life:
    """One life of a run over the same journal."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.engine = Turns()
        kind_of_game = EnvironmentKind("duel", "runner", make=Duel, takes_truncated=True, roles=ROLES)
        renderer = ChatRenderer(TOKENIZER, Template(kind="plain"))
        self.runner = RolloutRunner(
            cast(Any, self.engine), None, TOKENIZER, 3, 2, host=EnvironmentHost(kind_of_game), renderer=renderer
        )
        self.stream = PromptStream(SOURCES, TOKENIZER, Data(train=SOURCES), 3)
        self.journal = Journal(folder / "journal")
        parts = self.stream, self.runner, cast(Rewards, Judge()), self.journal

        def plans(step: int) -> RolloutPlan | None:
            return PLAN if step < 4 else None

        self.source: SyncSource | AsyncSource
        if kind == "sync":
            self.source = SyncSource(*parts)
        elif kind == "ahead":
            self.source = AheadSource(*parts, plans, lambda text: None, lambda text: None)
        else:
            self.source = AsyncSource(*parts, plans, 1, 20.0, lambda text: None)

    def step(self, number: int) -> RolloutBatch:
        found = self.source.next(number, PLAN, lambda text: None)
        self.source.start_next(number + 1)
        self.source.load(number)
        return found

    def saved(self) -> str:
        return json.dumps([self.stream.state(), self.source.pending_draws()])

    def restored(self, step: int, saved: str) -> None:
        state, pending = json.loads(saved)
        self.journal.rewind(step)
        self.stream.restore(state)
        self.engine.load(step, ())
        self.source.restore(pending, step)


@pytest.fixture
def lives() -> Iterator[list[Life]]:
    started: list[Life] = []
    yield started
    for life in started:
        life.source.close()


def told(trajectories: list[Trajectory]) -> list[Any]:
    return [(t.id, t.sample, t.role, t.completion, t.reward, t.metadata[PLAYERS], len(t.turns)) for t in trajectories]


def check(found: RolloutBatch) -> None:
    """Whole games of all samples, group after group; a player without a turn has no trajectory."""
    games: dict[tuple[str, int, int], list[Trajectory]] = {}
    for t in found.trajectories:
        games.setdefault((t.prompt_id, t.visit, t.sample // 2), []).append(t)
    assert set(games) == {(d.prompt.row.id, d.visit, k) for d in found.draws for k in range(4)}
    for players in games.values():
        assert [t.role for t in players] in (["first"], ["first", "second"])
        assert len(players) == players[0].metadata[PLAYERS] == (2 if players[0].num_actions > 3 else 1)
        is_scored = players[0].sample // 2 % 2 == 0
        for t in players:
            assert t.reward == ((1.0 if t.role == "first" else -1.0) if is_scored else len(t.completion) / 10)
    groups = pack(found.usable).sequence["group_ids"].tolist()
    assert groups == sorted(groups)
    assert {len(players) for players in games.values()} == {1, 2}


def test_a_stopped_round_of_games_goes_on_with_whole_games(tmp_path: Path) -> None:
    whole = Life(tmp_path / "whole", "sync")
    said: list[str] = []
    expected = whole.source.next(1, PLAN, said.append)
    check(expected)
    assert "rollout 12/12" in said  # games, not players
    assert len(expected.trajectories) > 12
    for after in (2, 5, 9):
        first = Life(tmp_path / str(after), "sync")

        def stop_at(text: str, life: Life = first, last: str = f"rollout {after}/12") -> None:
            if text == last:
                life.source.stop()

        with pytest.raises(RolloutStopped):
            first.source.next(1, PLAN, stop_at)
        second = Life(tmp_path / str(after), "sync")
        assert told(second.source.next(1, PLAN, lambda text: None).trajectories) == told(expected.trajectories)


def test_games_sampled_ahead_are_read_from_the_journal(tmp_path: Path, lives: list[Life]) -> None:
    whole = Life(tmp_path, "ahead")
    lives.append(whole)
    check(whole.step(1))
    saved = whole.saved()
    expected = whole.step(2)
    check(expected)
    second = Life(tmp_path, "ahead")
    lives.append(second)
    second.restored(1, saved)
    assert told(second.step(2).trajectories) == told(expected.trajectories)


def test_games_sampled_all_the_time_are_whole_before_and_after_a_stop(tmp_path: Path, lives: list[Life]) -> None:
    first = Life(tmp_path, "async")
    lives.append(first)
    check(first.step(1))
    saved = first.saved()
    source = cast(AsyncSource, first.source)
    source.thread.run()
    until = time.monotonic() + 600
    while not any(group.finished for group in source.groups.values()):
        assert time.monotonic() < until
        time.sleep(0.01)
    source.stop()
    with pytest.raises(RolloutStopped):
        source.next(2, PLAN, lambda text: None)
    second = Life(tmp_path, "async")
    lives.append(second)
    kept = dict(cast(AsyncSource, second.source)._resumed)
    assert kept
    second.restored(1, saved)
    found = second.step(2)
    check(found)
    check(second.step(3))
    done = {t.id: t for t in found.trajectories}
    for trajectories in kept.values():
        for t in trajectories:
            assert t.id not in done or told([done[t.id]]) == told([t])


class Waiting(Environment):
    """Replies to the first answer when it is told to."""

    is_asked, may_reply = threading.Event(), threading.Event()

    async def start(self, episode: Episode) -> Observation:
        return Observation(messages=({"role": "user", "content": "1>"},), role="first")

    async def step(self, answer: Answer) -> Observation | End:
        self.is_asked.set()
        while not self.may_reply.is_set():
            await asyncio.sleep(0.001)
        return End(rewards={"first": 1.0})


def test_a_reply_during_a_pause_is_taken_before_the_engine_goes_on(tmp_path: Path, lives: list[Life]) -> None:
    """Its interrupt ended a stream of the pause. With requests that take long, the episode would wait for one of them."""
    lives.append(life := Life(tmp_path, "async"))
    source = cast(AsyncSource, life.source)
    kind = EnvironmentKind("waiting", "loop", make=Waiting, takes_truncated=True, roles=ROLES)
    life.runner.host = EnvironmentHost(kind)
    source._add_group(PendingGroup(life.stream.draw(1)[0], replace(PLAN, n=1), 1, 0))
    while not Waiting.is_asked.is_set():
        source._sample()
    assert source.in_flight.waiting
    Waiting.may_reply.set()
    while not source.in_flight.has_replies or not source.in_flight._has_interrupted:
        time.sleep(0.001)
    source._on_finished(source.in_flight.pause_all())
    has_replies = list[bool]()

    def stream() -> Iterator[Completion]:
        has_replies.append(source.in_flight.has_replies)
        return iter(())

    life.engine.stream = stream  # type: ignore[method-assign]
    source._sample()
    assert has_replies == [False]
    assert not source.in_flight.waiting
