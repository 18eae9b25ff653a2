"""Worker processes for environments and tools: values on the wire, every way to fail, restarts, reuse, and that no process survives."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments import wire, worker_link
from burnish.environments.base import Answer, End, Episode, Event, Observation
from burnish.environments.tools.base import ToolResult
from burnish.environments.wire import decode_value, encode_value
from burnish.environments.worker_output import WorkerLog
from burnish.environments.workers import (
    NUM_QUIET_CLOSES,
    CallFailed,
    ObjectSpec,
    ObjectWorkers,
    RemoteObject,
    WorkerLimits,
)
from burnish.run.supervisor.processes import descendants

HERE = str(Path(__file__).parent)
COUNTER = ObjectSpec("worker_objects.py:Counter", base=HERE)
EPISODE = Episode("rows/1#0.0", 5, [{"role": "user", "content": "go"}], extra={"board": [[1, 2]]})


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines in one event loop, so that the tests share a pool."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def shared(run: Callable[[Coroutine[Any, Any, Any]], Any]) -> Iterator[ObjectWorkers]:
    """One process for the tests in which it must survive."""

    async def make() -> ObjectWorkers:
        return ObjectWorkers(1, WorkerLimits(memory_gib=2))

    workers = run(make())
    yield workers
    counters = workers.counters()
    run(workers.aclose())
    assert counters["started"] == 1
    assert counters["restarts"] == 0


@asynccontextmanager
async def opened(workers: ObjectWorkers, number: int = 2) -> Any:
    objects = [await workers.open(COUNTER) for _ in range(number)]
    yield objects
    for one in objects:
        await one.close()


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        EPISODE,
        Answer("a", "<a>", "length", 3, 2),
        Observation(
            ({"role": "user", "content": "é"},), None, 0.5, "s", ({"type": "function"},), ("</a>",), True, "black"
        ),
        Observation(text="x", metrics={"m": 1.0}, events=(Event("tool_raised", "f", "why", "trace"),)),
        End(1.0, True, {"black": 1.0}, "won", {"m": 2.0}),
        ToolResult("7", 0.5, {"calls": 1.0}),
        {"a": [1, -2.5, None, True, "text", {"b": []}], wire.RECORD: "End"},
        [],
    ],
)
def test_a_value_is_the_same_after_the_wire(value: Any) -> None:
    assert decode_value(json.loads(json.dumps(encode_value(value)))) == value


def test_scalars_of_numpy_become_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert encode_value([numpy.float32(0.5), numpy.int64(3), numpy.bool_(True)]) == [0.5, 3, True]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"x", "the value is of type bytes; decode bytes"),
        ({"a": {1}}, "the value['a'] is of type set; make a sorted list"),
        ([float("inf")], "the value[0] is inf; a number must be finite"),
        ({1: 2}, "the value has the key 1 of type int"),
        (End(reward=object()), "the value.reward is of type object; only texts"),  # type: ignore[arg-type]
        (End(reward="1"), "the value.reward is of type str; it must be a number"),  # type: ignore[arg-type]
        (Observation(text=["a"]), "the value.text is of type list; it must be a text"),  # type: ignore[arg-type]
        (Observation(({"content": "x"},)), "the value.messages is of type tuple; it must be a tuple of messages"),
        (ToolResult(None), "the value.text is of type NoneType; it must be a text"),  # type: ignore[arg-type]
        ("x" * 2000, "the value has more than 0.0009"),
        (1 << 5000, "the value is an integer of 5001 bits"),
    ],
    ids=["bytes", "set", "infinite", "key", "object", "reward", "text", "messages", "result", "long", "integer"],
)
def test_what_is_not_plain_is_refused_with_its_place_and_type(value: Any, words: str) -> None:
    with pytest.raises(wire.UnsendableValue, match="^" + words.replace("[", r"\[")):
        encode_value(value, max_bytes=1000)


def test_a_list_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(wire.UnsendableValue, match="contains itself"):
        encode_value(value)


def test_messages_arrive_whole_however_the_bytes_are_split() -> None:
    found: list[dict[str, Any]] = []
    reader = wire.MessageReader(found.append, 100)
    messages = [{"id": k, "value": "é" * k} for k in range(5)]
    data = b"".join(wire.frame(message) for message in messages)
    for k in range(len(data)):
        reader.feed(data[k : k + 1])
    assert found == messages
    with pytest.raises(ValueError, match="a message of 101 bytes"):
        reader.feed(wire.HEADER.pack(101))


def test_a_worker_loads_nothing_heavy() -> None:
    code = "import sys, burnish.environments.worker_process as w; print(sorted({'torch', 'numpy', 'transformers', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- calls -----------------------------------------------------------------------------------------------------------


def test_an_episode_is_played_in_a_worker(run: Any, shared: ObjectWorkers) -> None:
    async def scenario() -> None:
        async with opened(shared, 1) as (game,):
            assert await game.call("start", EPISODE) == Observation(text="rows/1#0.0", metrics={"seed": 5.0})
            assert await game.call("step", Answer("a", "<a>")) == Observation(text="<a>")
            assert await game.call("step", Answer("end", "end")) == End(reward=2.0)
            facts = await game.call("facts")
            assert facts["base"] == HERE  # a class that takes `base` gets the folder of relative paths
            assert facts["pid"] != os.getpid()
            assert await game.call("echo", {"a": (1, None)}) == {"a": [1, None]}

    run(scenario())


def test_a_class_that_knows_nothing_of_burnish_is_hosted(run: Any, shared: ObjectWorkers) -> None:
    async def scenario() -> None:
        plain = await shared.open(ObjectSpec("worker_objects.py:Plain", {"target": "t"}, HERE))
        assert await plain.call("greet", "you") == "hello you"
        assert await plain.call("schema") == {"function": {"name": "t"}}
        await plain.close()

    run(scenario())


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        ("raises", "raised", "Counter.raises: ValueError: no such square"),
        ("raises_async", "raised", "Counter.raises_async: KeyError: 'lost'"),
        ("exits", "raised", "Counter.exits: SystemExit: 3"),
        ("exits_async", "raised", "Counter.exits_async: SystemExit: 3"),
        ("allocates", "raised", "Counter.allocates: MemoryError: ; environment.memory_gib limits"),
        ("missing", "raised", "Counter has no method 'missing'"),
        ("hangs", "timed_out", "Counter.hangs did not return in 0.05 s"),
        ("hangs_async", "timed_out", "Counter.hangs_async did not return in 0.05 s"),
        ("spins", "timed_out", "Counter.spins did not return in 0.05 s"),
        ("returns_bytes", "bad_reply", "what Counter.returns_bytes returned is of type bytes"),
        ("returns_nan", "bad_reply", "what Counter.returns_nan returned.reward is nan"),
        ("returns_object", "bad_reply", "what Counter.returns_object returned[1] is of type _thread.lock"),
        ("end", "bad_reply", "Counter.end returned str; it must return End"),
        ("returns_much", "bad_reply", "the value has more than 16 MiB"),
    ],
)
def test_a_failure_concerns_one_object_only(
    run: Any, shared: ObjectWorkers, method: str, kind: str, words: str
) -> None:
    async def scenario() -> None:
        async with opened(shared) as (bad, good):
            await good.call("start", EPISODE)
            waiting = asyncio.create_task(good.call("hangs"))
            with pytest.raises(CallFailed) as failed:
                await bad.call(method, deadline_s=0.05 if kind == "timed_out" else None)
            assert failed.value.kind == kind
            assert failed.value.message.startswith(words)
            if kind == "raised" and method != "missing":
                assert "worker_objects.py" in failed.value.traceback
                assert "object_host.py" not in failed.value.traceback
            assert await good.call("step", Answer("a", "b")) == Observation(text="b")
            await asyncio.gather(bad.call("release"), good.call("release"))
            assert await waiting is None

    run(scenario())


def test_a_task_past_its_deadline_is_cancelled_and_a_thread_is_left_behind(run: Any, shared: ObjectWorkers) -> None:
    async def scenario() -> None:
        async with opened(shared, 1) as (game,):
            before = shared.counters()
            for method in ("hangs", "hangs_async"):
                with pytest.raises(CallFailed):
                    await game.call(method, deadline_s=0.01)
            assert (await game.call("facts"))["steps"] == 77
            await game.call("release")
            after = shared.counters()
            assert after["calls_timed_out"] - before["calls_timed_out"] == 2
            assert after["abandoned_threads"] - before["abandoned_threads"] == 1

    run(scenario())


def test_an_interrupted_call_fails_as_if_its_deadline_had_passed(run: Any, shared: ObjectWorkers) -> None:
    async def scenario() -> None:
        async with opened(shared, 1) as (game,):
            for method in ("hangs", "hangs_async"):
                calling = asyncio.create_task(game.call(method, deadline_s=1000))
                await game.call("facts")  # requests are answered in order of arrival, so the first call has begun
                await game.interrupt()
                with pytest.raises(CallFailed, match="was interrupted") as failed:
                    await calling
                assert failed.value.kind == "timed_out"
            await game.call("release")

    run(scenario())


def test_output_and_forks_of_user_code_reach_the_log_and_not_the_wire(run: Any, tmp_path: Path) -> None:
    log = tmp_path / "workers.log"

    async def scenario() -> None:
        workers = ObjectWorkers(1)
        workers.log = WorkerLog(log)
        async with opened(workers, 1) as (game,):
            assert await game.call("prints") == 5
            assert await game.call("forks") > 0
            assert await game.call("echo", 1) == 1
            with pytest.raises(CallFailed):
                await game.call("raises")
            with pytest.raises(CallFailed):
                await game.call("ends_process")
        await workers.aclose()

    run(scenario())
    lines = log.read_text().splitlines()
    assert lines[1999] == "0| 1999 " + "y" * 495
    assert lines[2000] == '0| {"id": 0}'
    assert lines[2001] == "0| raised: Counter.raises: ValueError: no such square"
    assert any("worker_objects.py" in line for line in lines[2002:])  # its traceback
    assert any(line.startswith("0| environment worker 0 exited with status 7") for line in lines[2002:])
    assert {line[:3] for line in lines} == {"0| "}


def test_a_log_keeps_its_newest_lines(tmp_path: Path) -> None:
    for number in range(2):  # the second is that of a resumed run
        log = WorkerLog(tmp_path / "workers.log", max_bytes=100)
        for k in range(50):
            log.write(number, [b"line %d" % k])
            assert log.path.stat().st_size <= 100
    lines = log.path.read_text().splitlines()
    assert lines == [f"1| line {k}" for k in range(50 - len(lines), 50)]
    assert len(lines) >= 4
    log.write(1, [b"x" * 1000])
    assert log.path.stat().st_size <= 100


def test_an_object_whose_opening_is_cancelled_is_closed(run: Any, shared: ObjectWorkers) -> None:
    async def scenario() -> None:
        before = shared.counters()["opened"]
        opening = asyncio.create_task(shared.open(COUNTER))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        while left := shared._tasks - shared._following:  # the opening, then the closing
            await asyncio.wait(left)
            await asyncio.sleep(0)
        assert shared.counters()["opened"] == before + 1
        assert not shared._workers[0].open_objects

    run(scenario())


def test_a_constructor_fails_its_object_and_a_user_error_passes_through(run: Any, shared: ObjectWorkers) -> None:
    async def scenario() -> None:
        with pytest.raises(CallFailed, match=r"raised: Fails\(\): RuntimeError: no licence"):
            await shared.open(ObjectSpec("worker_objects.py:Fails", base=HERE))
        for spec, words in [
            (ObjectSpec("worker_objects.py:Refuses", base=HERE), "the data folder is missing"),
            (ObjectSpec("worker_objects.py:Countr", base=HERE), "did you mean 'Counter'"),
            (ObjectSpec("worker_objects.py:Counter", {"sice": 1}, HERE), "unknown option 'sice'; did you mean 'size'"),
        ]:
            with pytest.raises(UserError, match=words):
                await shared.open(spec)
        async with opened(shared, 1) as (game,):
            with pytest.raises(UserError, match=r"give environment\.options\.size"):
                await game.call("user_error")

    run(scenario())


def test_methods_past_the_limit_of_threads_wait_without_losing_time(run: Any) -> None:
    async def scenario() -> None:
        workers = ObjectWorkers(1, WorkerLimits(max_threads=1))
        async with opened(workers) as (first, second):
            hanging = asyncio.create_task(first.call("hangs"))
            waiting = asyncio.create_task(second.call("echo", 4, deadline_s=0.1))
            await first.call("step", Answer("", ""))  # an `async def` method needs no thread
            await asyncio.wait([waiting], timeout=0.3)
            assert not waiting.done()
            await first.call("release_async")
            assert await waiting == 4
            assert await hanging is None
        await workers.aclose()

    run(scenario())


# --- ends of processes -----------------------------------------------------------------------------------------------


def play(scenario: Callable[[ObjectWorkers], Coroutine[Any, Any, None]], **options: Any) -> dict[str, int]:
    """Play a scenario with a pool of its own; returns its counters. No process is left behind."""

    async def main() -> dict[str, int]:
        limits = WorkerLimits(memory_gib=2, unresponsive_s=options.pop("unresponsive_s", 30.0))
        workers = ObjectWorkers(options.pop("num_workers", 1), limits, **options)
        try:
            await scenario(workers)
            return workers.counters()
        finally:
            await workers.aclose()

    before = set(descendants(os.getpid()))
    counters = asyncio.run(main())
    assert set(descendants(os.getpid())) <= before
    return counters


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ends_process", "exited with status 7 (did user code call os._exit?); its last output:\n  | about to end"),
        ("closes_descriptors", "environment worker 0 "),
        ("SIGKILL", "was killed by SIGKILL"),
    ],
)
def test_a_process_that_ends_fails_all_its_calls_and_is_replaced(method: str, words: str) -> None:
    async def scenario(workers: ObjectWorkers) -> None:
        bad, good = await workers.open(COUNTER), await workers.open(COUNTER)
        pid = (await bad.call("facts"))["pid"]
        waiting = asyncio.create_task(good.call("hangs"))
        await good.call("echo", 0)
        if method == "SIGKILL":
            os.kill(pid, signal.SIGKILL)
        else:
            with pytest.raises(CallFailed):
                await bad.call(method)
        with pytest.raises(CallFailed) as failed:
            await waiting
        assert failed.value.kind == "died"
        assert words in failed.value.message
        with pytest.raises(CallFailed):
            await good.call("facts")
        await bad.close()
        await good.close()
        again = await workers.open(COUNTER)
        assert (await again.call("facts"))["pid"] != pid

    counters = play(scenario)
    assert (counters["started"], counters["restarts"]) == (2, 1)
    assert (counters["died"], counters["calls_died"]) == (1, 2 if method == "SIGKILL" else 3)


def test_objects_of_a_process_that_died_do_not_raise_the_limit_again() -> None:
    async def scenario(workers: ObjectWorkers) -> None:
        objects = [await workers.open(COUNTER) for _ in range(2 * NUM_QUIET_CLOSES)]
        with pytest.raises(CallFailed):
            await objects[0].call("ends_process")
        for one in objects:
            await one.close()
        assert workers._max_objects == NUM_QUIET_CLOSES
        again = [await workers.open(COUNTER) for _ in range(NUM_QUIET_CLOSES)]
        for one in again:
            await one.close()
        assert workers._max_objects == 2 * NUM_QUIET_CLOSES

    play(scenario)


@pytest.mark.parametrize(
    ("method", "deadline_s", "other_deadline_s"), [("blocks_loop", 1000, 0.01), ("holds_python_lock", 0.01, 1000)]
)
def test_a_process_that_does_not_answer_is_killed_and_only_the_call_that_blocks_it_is_blamed(
    method: str, deadline_s: float, other_deadline_s: float
) -> None:
    async def scenario(workers: ObjectWorkers) -> None:
        bad, good = await workers.open(COUNTER), await workers.open(COUNTER)
        calls = [bad.call(method, deadline_s=deadline_s), good.call("hangs", deadline_s=other_deadline_s)]
        late, other = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(late, CallFailed)
        assert isinstance(other, CallFailed)
        assert (late.kind, other.kind) == ("timed_out", "died")
        assert (late.has_neighbours, other.has_neighbours) == (False, True)  # the call to blame is the only cause
        assert "did not answer" in other.message
        assert f"in {method}" in other.message  # the stacks are shown
        assert await (await workers.open(COUNTER)).call("echo", 1) == 1

    counters = play(scenario, unresponsive_s=0.3)
    assert [counters[k] for k in ("calls_timed_out", "calls_died", "blocked", "died", "restarts")] == [1, 1, 1, 0, 1]


def test_a_process_with_many_threads_left_behind_ends_with_its_last_object() -> None:
    async def scenario(workers: ObjectWorkers) -> None:
        bad, good = await workers.open(COUNTER), await workers.open(COUNTER)
        await good.call("start", EPISODE)
        pid = (await good.call("facts"))["pid"]
        for _ in range(3):
            with pytest.raises(CallFailed):
                await bad.call("hangs", deadline_s=0.01)
        new = await workers.open(COUNTER)
        assert (await new.call("facts"))["pid"] != pid
        assert await good.call("step", Answer("a", "b")) == Observation(text="b")  # those in it play on
        await bad.close()
        link = next(iter(workers._draining)).starting.result()
        await good.close()
        assert "threads left behind" in (await link.gone).text

    counters = play(scenario, max_abandoned=2)
    assert (counters["abandoned_threads"], counters["started"], counters["died"]) == (3, 2, 0)


def test_three_failed_starts_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link.sys, "executable", "/bin/false")

    async def scenario(workers: ObjectWorkers) -> None:
        with pytest.raises(
            UserError, match=r"3 worker processes .* exited with status 1.*raise environment\.memory_gib \(now 2\)"
        ):
            await workers.open(COUNTER)

    assert play(scenario, num_workers=2)["started"] == 0


def test_a_start_without_a_free_descriptor_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(worker_link.tempfile, "TemporaryFile", refuse)

    async def scenario(workers: ObjectWorkers) -> None:
        with pytest.raises(UserError, match=r"3 worker processes .* Too many open files"):
            await workers.open(COUNTER)

    assert play(scenario)["started"] == 0


def test_objects_are_spread_and_reusable_ones_are_started_again() -> None:
    async def scenario(workers: ObjectWorkers) -> None:
        games: list[RemoteObject] = [await workers.open(COUNTER, is_reusable=True) for _ in range(4)]
        facts = [await game.call("facts") for game in games]
        pids = [fact["pid"] for fact in facts]
        assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
        await games[0].call("start", EPISODE)
        await games[0].call("step", Answer("", ""))
        with pytest.raises(CallFailed):
            await games[1].call("raises")
        for game in games:
            await game.close()
        with pytest.raises(RuntimeError, match="after close"):
            await games[0].call("facts")
        again = [
            await workers.open(COUNTER, is_reusable=True) for _ in range(3)
        ]  # one failed and one did not fit: a new one
        found = [await game.call("facts") for game in again]
        assert [fact["closed"] for fact in found] == [1, 1, 0]
        kept = {(fact["pid"], fact["number"]) for fact in found[:2]}
        assert kept == {(facts[k]["pid"], facts[k]["number"]) for k in (0, 2)}
        for game in again:
            await game.call("start", EPISODE)
            assert (await game.call("facts"))["steps"] == 0
        other = await workers.open(ObjectSpec(COUNTER.path, {"size": 2}, HERE), is_reusable=True)
        assert (await other.call("facts"))["closed"] == 0

    counters = play(scenario, num_workers=2, max_idle=2)
    assert (counters["opened"], counters["reused"]) == (6, 2)


def test_no_process_survives_a_runner_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "runner.py"
    script.write_text(
        "import asyncio, sys\n"
        "from burnish.environments.workers import ObjectSpec, ObjectWorkers\n"
        "async def main():\n"
        "    workers = ObjectWorkers(2)\n"
        f"    games = [await workers.open(ObjectSpec('worker_objects.py:Counter', base={HERE!r})) for _ in range(2)]\n"
        "    print(*[(await game.call('facts'))['pid'] for game in games], flush=True)\n"
        "    await asyncio.gather(*[game.call('holds_python_lock') for game in games])\n"
        "asyncio.run(main())\n"
    )
    runner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    pids = [int(pid) for pid in runner.stdout.readline().split()]
    assert len(set(pids)) == 2
    handles = [os.pidfd_open(pid) for pid in pids]
    runner.kill()
    runner.wait()
    for handle in handles:
        assert wait_for_end(handle)


def wait_for_end(handle: int) -> bool:
    ended = bool(select.select([handle], [], [], 30)[0])
    os.close(handle)
    return ended
