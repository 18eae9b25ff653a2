"""Episodes whose environments fail, hang, are dropped or are closed: every failure has a stated result."""

from __future__ import annotations

import asyncio
import queue
import threading
import zlib
from pathlib import Path
from typing import Any, ClassVar

import pytest

from burnish.config.errors import UserError
from burnish.core.trajectory import EPISODE_METRICS, EVENTS
from burnish.environments import worker_link, workers
from burnish.environments.base import Answer, End, Environment, Episode, EpisodeFailed, Observation
from burnish.environments.host import (
    CLOSE_TIMEOUT_S,
    SESSIONS_TIMEOUT_S,
    EnvironmentHost,
    EnvironmentKind,
    HostReply,
)
from burnish.environments.workers import ObjectSpec
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.decoder import Decoder
from tests.rollout.counting_episodes import COUNTING, Counting, facts, played, runner_of


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


class Failing(Environment):
    """Fails in a way that the seed of the test chooses, for the first sample of the first row, as often as `times` says."""

    attempts: ClassVar[dict[str, int]] = {}

    def __init__(self, how: str, times: int) -> None:
        self.how, self.times, self.inner = how, times, Counting()

    async def start(self, episode: Episode) -> Observation:
        self.fails = episode.id == "r0#0.0" and self.attempts.get(episode.id, 0) < self.times
        self.attempts[episode.id] = self.attempts.get(episode.id, 0) + 1
        if self.fails and self.how == "reset":
            raise OSError("no board")
        return await self.inner.start(episode)

    async def step(self, answer: Answer) -> Any:
        if self.fails and answer.turn == 1:
            if self.how == "raises":
                raise ValueError("no such move")
            if self.how == "hangs":
                await asyncio.Event().wait()
            if self.how == "nothing":
                return None
            if self.how == "nan":
                return End(reward=float("nan"))
            if self.how == "garbage":
                return Observation(messages=("not a message",))  # type: ignore[arg-type]
            raise EpisodeFailed("worker_died", "step() lost its process")
        return await self.inner.step(answer)


KINDS = {
    "reset": "reset_failed",
    "raises": "step_failed",
    "hangs": "step_timed_out",
    "nothing": "no_reply",
    "nan": "bad_reply",
    "garbage": "bad_reply",
    "died": "worker_died",
}


@pytest.mark.parametrize("how", KINDS)
def test_what_the_machinery_breaks_is_tried_again_and_then_leaves_the_group(model: Decoder, how: str) -> None:
    expected = facts(played(runner_of(DenseEngine(model), Counting)))
    for times, retries in ((1, 1), (2, 1)):
        Failing.attempts.clear()
        deadline_s = 0.2 if how == "hangs" else 60.0
        runner = runner_of(DenseEngine(model), lambda n=times: Failing(how, n), retries=retries, deadline_s=deadline_s)  # type: ignore[misc]
        found = played(runner)
        failed = found.pop("r0#0.0")
        assert {name: facts(found)[name] for name in found} == {k: v for k, v in expected.items() if k != "r0#0.0"}
        assert [event["kind"] for event in failed.metadata[EVENTS]] == [KINDS[how]] * times
        if times <= retries:
            assert facts({"r0#0.0": failed})["r0#0.0"] == expected["r0#0.0"]
            assert failed.metadata[EPISODE_METRICS]["retries"] == 1
        else:
            assert failed.finish == "error"
            assert failed.reward is None
            assert failed.error is not None
            assert "r0" in failed.error
    if how == "raises":
        assert "no such move" in failed.metadata[EVENTS][0]["traceback"]


UNRELIABLE = (
    COUNTING
    + """

import os, zlib


class Unreliable(Counting):
    # One call in twenty kills its process, hangs or raises, at the first attempt or always.
    attempts = {}

    async def start(self, episode):
        self.id = episode.id
        return await super().start(episode)

    async def step(self, answer):
        luck = zlib.crc32(f"60:{self.id}/{answer.turn}".encode()) % 60
        if luck == 0:
            os._exit(9)
        if luck == 1:
            import asyncio
            await asyncio.Event().wait()
        if luck == 2:
            raise OSError("the server is gone")
        return await super().step(answer)
"""
)


def test_with_one_call_in_twenty_killed_hung_or_raising_all_other_episodes_are_as_undisturbed(
    model: Decoder, tmp_path: Path
) -> None:
    expected = facts(played(runner_of(DenseEngine(model), Counting), 20))
    (tmp_path / "unreliable.py").write_text(UNRELIABLE)
    spec = ObjectSpec("unreliable.py:Unreliable", {}, str(tmp_path))
    found = played(runner_of(DenseEngine(model), None, "worker", spec, retries=1, deadline_s=1.0), 20)
    doomed = {
        f"{row}#0.{sample}"
        for row in ("r0", "r1")
        for sample in range(20)
        if any(zlib.crc32(f"60:{row}#0.{sample}/{turn}".encode()) % 60 < 3 for turn in range(3))
    }
    assert len(doomed) == 3  # one of each kind
    assert {name for name, t in found.items() if t.reward is None} == doomed
    assert {name: one for name, one in facts(found).items() if name not in doomed} == {
        name: one for name, one in expected.items() if name not in doomed
    }
    for name in doomed:
        assert {event["kind"] for event in found[name].metadata[EVENTS]} & {
            "worker_died",
            "step_timed_out",
            "step_failed",
        }


def test_an_episode_that_waits_for_something_cancelled_fails_and_does_not_wait_for_ever(model: Decoder) -> None:
    class Cancelled(Environment):
        async def start(self, episode: Episode) -> Observation:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            return await future

    found = played(runner_of(DenseEngine(model), Cancelled, retries=1))
    assert len(found) == 4
    for t in found.values():
        assert [event["kind"] for event in t.metadata[EVENTS]] == ["step_failed"] * 2
        assert "start() was cancelled" in (t.error or "")


def test_a_time_out_of_the_environment_itself_keeps_its_text(model: Decoder) -> None:
    class NoRoom(Environment):
        async def start(self, episode: Episode) -> Observation:
            raise TimeoutError("the server had no room for 3 s")

    for t in played(runner_of(DenseEngine(model), NoRoom)).values():
        assert t.error == f"row {t.prompt_id}: the environment's start() timed out: the server had no room for 3 s"


def test_an_episode_that_is_dropped_during_a_call_closes_after_the_call() -> None:
    told = list[str]()
    is_waiting, may_return, is_closed = threading.Event(), asyncio.Event(), threading.Event()

    class Slow(Environment):
        def __init__(self) -> None:
            told.append("made")

        async def start(self, episode: Episode) -> Observation:
            is_waiting.set()
            await may_return.wait()
            told.append("started")
            return Observation()

        async def close(self) -> None:
            told.append("closed")
            is_closed.set()

    host = EnvironmentHost(EnvironmentKind("test", "loop", make=Slow))
    session, replies = host.open(), queue.SimpleQueue[HostReply]()
    host.ask(session, "start", Episode("r#0.0", 0, ""), 0, replies, lambda: None)
    assert is_waiting.wait(10)
    host.close_session(session)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), host._event_loop()).result()
    host._event_loop().call_soon_threadsafe(may_return.set)
    assert replies.get(timeout=10).reply == Observation()
    assert is_closed.wait(10)
    host.close()
    assert told == ["made", "started", "closed"]


def test_a_host_that_closes_lets_sessions_close_and_cancels_calls() -> None:
    told = list[str]()
    is_waiting = threading.Event()

    class OnServer(Environment):
        async def start(self, episode: Episode) -> Observation:
            if episode.sample:
                is_waiting.set()
                await asyncio.Event().wait()
            return Observation()

        async def close(self) -> None:
            await asyncio.sleep(0.05)
            told.append("closed")

    host = EnvironmentHost(EnvironmentKind("test", "loop", make=OnServer))
    sessions, replies = [host.open(), host.open()], queue.SimpleQueue[HostReply]()
    for k, session in enumerate(sessions):
        host.ask(session, "start", Episode("r#0.0", 0, "", sample=k), k, replies, lambda: None)
    assert replies.get(timeout=10).ticket == 0
    assert is_waiting.wait(10)
    for session in sessions:
        host.close_session(session)
    host.close()
    assert told == ["closed"] * 2


def test_a_host_waits_longer_for_its_workers_than_they_do_for_objects_and_processes() -> None:
    assert (
        SESSIONS_TIMEOUT_S + workers.CLOSE_DEADLINE_S + worker_link.EXIT_WAIT_S + worker_link.KILL_TIMEOUT_S
        < CLOSE_TIMEOUT_S
    )


def test_a_user_error_ends_the_run(model: Decoder) -> None:
    class Wrong(Environment):
        async def start(self, episode: Episode) -> Observation:
            raise UserError("the row has no board")

    with pytest.raises(UserError, match="no board"):
        played(runner_of(DenseEngine(model), Wrong))
