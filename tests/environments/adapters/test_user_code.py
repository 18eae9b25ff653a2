"""What the adapters share: the thread of user code, random states, and checks on what user code returns."""

import asyncio
import gc
import random
import sqlite3
import threading
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.adapters.user_code import (
    OwnRandomState,
    checked_content,
    finite,
    load_target,
    numbers,
    opening_messages,
    row_columns,
)
from burnish.environments.adapters.user_thread import UserThread
from tests.environments.adapters.episodes import USER_FILES, episode


def test_calls_of_an_object_are_in_one_thread_outside_of_the_loop():
    async def run() -> int:
        thread = UserThread()
        connection = await thread.run(sqlite3.connect, ":memory:")  # refuses other threads
        assert await thread.run(threading.get_ident) != threading.get_ident()
        return (await thread.run(lambda: connection.execute("select 7").fetchone()))[0]

    assert asyncio.run(run()) == 7


def test_hanging_call_does_not_stop_the_loop_and_stays_unfinished_when_cancelled():
    release = threading.Event()

    async def run() -> tuple[bool, int]:
        hanging, other = UserThread(), UserThread()
        task = asyncio.create_task(hanging.run(release.wait))
        value = await other.run(lambda: 5)
        task.cancel()
        await asyncio.sleep(0)
        await other.run(int)
        is_left_behind = not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return is_left_behind, value

    assert asyncio.run(run()) == (True, 5)


def test_exceptions_of_any_kind_reach_the_caller():
    def stop() -> None:
        raise StopIteration("over")

    async def run() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await UserThread().run(stop)
        with pytest.raises(RuntimeError, match="user code raised SystemExit: 3"):
            await UserThread().run(exit, 3)

    asyncio.run(run())


def test_thread_ends_with_its_object():
    async def run() -> threading.Thread:
        thread = UserThread()
        found: threading.Thread = await thread.run(threading.current_thread)
        return found

    found = asyncio.run(run())
    gc.collect()
    found.join(timeout=30)
    assert not found.is_alive()


def test_async_functions_run_in_the_loop():
    async def where() -> int:
        return threading.get_ident()

    async def run() -> int:
        ident: int = await UserThread().call(where)
        return ident

    assert asyncio.run(run()) == threading.get_ident()


def test_random_states_are_sequences_of_their_own():
    numpy = pytest.importorskip("numpy")

    def draw(state: OwnRandomState) -> tuple[float, float]:
        with state.active():
            return random.random(), float(numpy.random.random())

    alone = OwnRandomState(3)
    expected = [draw(alone) for _ in range(3)]
    assert expected[0] == (random.Random(3).random(), numpy.random.RandomState(3).random())
    before, numpy_before = random.getstate(), numpy.random.get_state()[1].tolist()
    first, second = OwnRandomState(3), OwnRandomState(4)
    mixed = []
    for _ in range(3):
        mixed.append(draw(first))
        draw(second)
    assert mixed == expected
    assert random.getstate() == before
    assert numpy.random.get_state()[1].tolist() == numpy_before


def test_state_is_restored_if_user_code_raises():
    def fail() -> None:
        with OwnRandomState(1).active():
            raise ValueError(f"no {random.random()}")

    before = random.getstate()
    with pytest.raises(ValueError, match="no"):
        fail()
    assert random.getstate() == before


@pytest.mark.parametrize("value", [None, "much", float("nan"), float("inf")])
def test_rewards_are_never_guessed(value: Any):
    with pytest.raises(ValueError, match=r"lock\.step returned"):
        finite(value, "lock.step")


def test_metrics_are_the_finite_numbers():
    numpy = pytest.importorskip("numpy")
    values = {"a": 1, "b": True, "c": float("nan"), "d": "text", "e": numpy.float32(0.5), "f": [1], "g": numpy.zeros(2)}
    assert numbers(values, "x/") == {"x/a": 1.0, "x/b": 1.0, "x/e": 0.5}
    assert numbers(None) == {}


def test_opening_messages_keep_the_row_as_it_is():
    row = episode(prompt=[{"role": "user", "content": "Play."}, {"role": "assistant", "content": "Yes."}])
    assert [m["content"] for m in opening_messages(row, "Now.", "row_first")] == ["Play.", "Yes.", "Now."]
    assert opening_messages(row, "Now.", "observation") == ({"role": "user", "content": "Now."},)
    assert row_columns(episode(answer=4, level=1)) == {"prompt": "Go.", "level": 1, "answer": 4}


def test_text_and_images_are_content():
    assert checked_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "x") == "ab"
    seen = [{"type": "image", "image": 0}, {"type": "text", "text": "b"}]
    assert checked_content(seen, "x") == seen
    with pytest.raises(UserError, match="x has content parts of type sound"):
        checked_content([{"type": "sound", "sound": 0}], "x")


def test_missing_target_is_named():
    with pytest.raises(UserError, match=r"defines no 'Saef'; did you mean 'Safe'"):
        load_target("trl_env.py:Saef", USER_FILES, {})
