"""Episodes with tool calls: results in order, limits, and what every kind of failure does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from burnish.config.errors import UserError
from burnish.environments.base import Answer, End, Episode, EpisodeFailed, Observation, RunsIn
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.episode_tools import cut_middle
from burnish.environments.tools.tool_environment import ToolEnvironment
from burnish.environments.tools.tool_handles import LocalTool, RemoteTool


def schema(name: str, *parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


class Echo(Tool):
    """Returns what its function makes of the arguments."""

    runs_in: ClassVar[RunsIn] = "loop"

    def __init__(self, name: str, make: Callable[[dict[str, Any]], Any]) -> None:
        self.schema, self.make = schema(name, "text"), make

    async def call(self, arguments: dict[str, Any]) -> Any:
        found = self.make(arguments)
        return await found if asyncio.iscoroutine(found) else found


def echo(name: str = "echo", make: Callable[[dict[str, Any]], Any] = lambda arguments: arguments["text"]) -> LocalTool:
    return LocalTool(lambda: Echo(name, make))


class Ledger(Tool):
    """Adds amounts up over an episode. Each object notes what happens to it."""

    runs_in: ClassVar[RunsIn] = "loop"
    is_stateful: ClassVar[bool] = True
    schema = schema("ledger", "amount")

    def __init__(self, log: list[str], reward: float | None = None) -> None:
        self.log, self.reward, self.total = log, reward, 0

    async def start(self, episode: Episode, arguments: Mapping[str, Any]) -> None:
        self.total = arguments.get("start", 0)
        self.log.append(f"start {episode.id} {self.total}")

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        before = self.total
        await asyncio.sleep(0)
        self.total = before + int(arguments["amount"])
        return ToolResult(str(self.total), self.reward, {"ledger/calls": 1})

    async def end(self) -> float | None:
        self.log.append("end")
        return None if self.reward is None else float(self.total)

    async def close(self) -> None:
        self.log.append("close")


def calls(*written: tuple[str, dict[str, Any]]) -> Answer:
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in written
    )
    return Answer(text, text)


def said(text: str) -> Answer:
    return Answer(text, text)


EPISODE = Episode("row/0#0.0", seed=1, prompt="Add.")


def play(environment: ToolEnvironment, *answers: Answer, episode: Episode = EPISODE) -> list[Any]:
    """All replies to some answers; the episode is closed after them."""

    async def run() -> list[Any]:
        try:
            found: list[Any] = [await environment.start(episode)]
            for answer in answers:
                found.append(await environment.step(answer))
            return found
        finally:
            await environment.close()

    return asyncio.run(run())


def contents(observation: Observation) -> list[str]:
    assert observation.messages is not None
    return [message["content"] for message in observation.messages]


def test_results_come_back_in_the_order_of_the_calls_although_they_run_together() -> None:
    released = asyncio.Event()

    async def slow() -> str:
        await released.wait()
        return "slow"

    def fast(arguments: dict[str, Any]) -> str:
        released.set()  # the first call ends only because the second one runs at the same time
        return "fast"

    environment = ToolEnvironment([echo("slow", lambda _: slow()), echo("fast", fast)], "hermes")
    start, seen, end = play(environment, calls(("slow", {}), ("fast", {})), said("Done."))
    assert [tool["function"]["name"] for tool in start.tools] == ["slow", "fast"]
    assert start.messages is None
    assert seen.messages == (
        {"role": "tool", "tool_call_id": "call00000", "name": "slow", "content": "slow"},
        {"role": "tool", "tool_call_id": "call00001", "name": "fast", "content": "fast"},
    )
    assert seen.metrics == {"tool_calls": 2, "tool_errors": 0}
    assert end == End(reward=None)


def test_malformed_and_unknown_calls_are_answered_with_an_error() -> None:
    bad = said('<tool_call>\n{"name": "echo"}\n</tool_call>\n' + calls(("ehco", {}), ("echo", {"text": "x"})).raw_text)
    _, seen = play(ToolEnvironment([echo()], "hermes"), bad)
    malformed, unknown, right = contents(seen)
    assert malformed == 'Error: this is not a valid tool call: the JSON object has no key "arguments"'
    assert unknown == "Error: there is no tool 'ehco'; did you mean 'echo'? (tools: echo)"
    assert right == "x"
    assert "name" not in seen.messages[0]
    assert [event.kind for event in seen.events] == ["tool_malformed", "tool_unknown"]
    assert seen.metrics == {"tool_calls": 3, "tool_errors": 2, "tool_errors/malformed": 1, "tool_errors/unknown": 1}


def test_further_calls_than_allowed_get_an_error_and_are_not_made() -> None:
    made: list[str] = []
    tool = echo(make=lambda arguments: made.append(arguments["text"]) or "ok")
    environment = ToolEnvironment([tool], "hermes", max_calls=3, max_parallel_calls=2)
    three = calls(*(("echo", {"text": name}) for name in "abc"))
    _, first, second = play(environment, three, three)
    assert contents(first) == ["ok", "ok", "Error: only 2 calls are allowed at once; this one was not made"]
    assert contents(second)[:2] == ["ok", "Error: all 3 calls are spent; this one was not made. Answer now"]
    assert made == ["a", "b", "a"]
    assert second.metrics["tool_errors/refused"] == 2


def test_a_tool_that_raises_is_text_and_an_event_or_fails_the_episode() -> None:
    tool = echo(make=lambda _: 1 / 0)
    _, seen = play(ToolEnvironment([tool], "hermes"), calls(("echo", {})))
    assert contents(seen) == ["Error: ZeroDivisionError: division by zero"]
    (event,) = seen.events
    assert (event.kind, event.what) == ("tool_raised", "echo")
    assert "1 / 0" in event.traceback
    with pytest.raises(EpisodeFailed) as failure:
        play(ToolEnvironment([tool], "hermes", on_error="fail"), calls(("echo", {})))
    assert failure.value.kind == "tool_raised"
    assert "ZeroDivisionError" in failure.value.traceback


def test_a_tool_that_hangs_is_left_after_its_deadline() -> None:
    tool = echo(make=lambda _: asyncio.sleep(3600))
    _, seen = play(ToolEnvironment([tool], "hermes", deadline_s=0.01), calls(("echo", {})))
    assert contents(seen) == ["Error: echo timed out after 0.01 s"]
    assert [event.kind for event in seen.events] == ["tool_timed_out"]


def test_a_time_out_inside_a_tool_is_not_its_deadline() -> None:
    def fail(_: dict[str, Any]) -> str:
        raise TimeoutError("the server did not answer")

    _, seen = play(ToolEnvironment([echo(make=fail)], "hermes"), calls(("echo", {})))
    assert contents(seen) == ["Error: TimeoutError: the server did not answer"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        (7, "7"),
        (None, "None"),
        ({"a": [1]}, "{'a': [1]}"),
        ("half \ud800", "half ?"),
    ],
)
def test_garbage_becomes_text(value: Any, text: str) -> None:
    _, seen = play(ToolEnvironment([echo(make=lambda _: value)], "hermes"), calls(("echo", {})))
    assert contents(seen) == [text]


def test_a_long_result_is_cut_with_a_mark_and_counted() -> None:
    tool = echo(make=lambda _: "x" * 1_000_000)
    _, seen = play(
        ToolEnvironment([tool], "hermes", max_result_chars=90, cut=lambda text: text[:100]), calls(("echo", {}))
    )
    assert contents(seen) == [("x" * 60 + "\n... (999910 characters left out) ...\n" + "x" * 30)[:100]]
    assert seen.metrics["tool_results_cut"] == 1
    assert [event.kind for event in seen.events] == ["tool_cut"]
    assert cut_middle("abcdef", 6) == "abcdef"
    assert cut_middle("abcdef", 3) == "ab\n... (3 characters left out) ...\nf"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
def test_a_reward_that_is_no_number_fails_the_episode(reward: Any) -> None:
    tool = echo(make=lambda _: ToolResult("ok", reward))
    with pytest.raises(EpisodeFailed, match="tool 'echo' gave the reward"):
        play(ToolEnvironment([tool], "hermes", rewards="tools"), calls(("echo", {})))


def test_rewards_of_tools_score_the_episode_only_if_asked_for() -> None:
    tool = echo(make=lambda arguments: ToolResult("ok", float(arguments["text"])))
    two = calls(("echo", {"text": "0.5"}), ("echo", {"text": "0.25"}))
    _, seen, end = play(ToolEnvironment([tool], "hermes", rewards="tools"), two, said("Done."))
    assert (seen.reward, end.reward) == (0.75, 0.0)
    with pytest.raises(UserError, match=r"gave a reward of 0\.5.*rewards: tools"):
        play(ToolEnvironment([tool], "hermes"), two)
    _, seen, end = play(ToolEnvironment([tool], "hermes"), calls(("echo", {"text": "0"})), said("Done."))
    assert (seen.reward, end.reward) == (0.0, None)  # verl's tools return 0.0 where they give none


def test_a_stateful_tool_lives_from_its_first_call_to_the_end() -> None:
    log: list[str] = []
    tool = LocalTool(lambda: Ledger(log, reward=0.0))
    episode = Episode("r#0.0", 1, "?", extra={"tools_kwargs": {"ledger": {"create_kwargs": {"start": 5}}}})
    two = calls(("ledger", {"amount": "1"}), ("ledger", {"amount": "2"}))
    environment = ToolEnvironment([tool], "hermes", rewards="tools")
    _, seen, end = play(environment, two, said("Done."), episode=episode)
    assert contents(seen) == ["6", "8"]  # one after another, in the order of the calls
    assert seen.metrics["ledger/calls"] == 2
    assert end == End(reward=8.0)
    assert log == ["start r#0.0 5", "end", "close"]
    log.clear()
    _, end = play(environment, said("Done."))
    assert (end.reward, log) == (0.0, [])  # never called, so never started


def test_a_tool_that_cannot_start_fails_the_episode_and_is_closed() -> None:
    log: list[str] = []

    class Broken(Ledger):
        async def start(self, episode: Episode, arguments: Mapping[str, Any]) -> None:
            raise OSError("no room")

    with pytest.raises(EpisodeFailed, match="could not start: OSError: no room") as failure:
        play(ToolEnvironment([LocalTool(lambda: Broken(log))], "hermes"), calls(("ledger", {"amount": "1"})))
    assert (failure.value.kind, log) == ("reset_failed", ["close"])


def test_a_row_selects_its_tools() -> None:
    environment = ToolEnvironment([echo("one"), echo("two")], "hermes")

    def starting(**extra: Any) -> Observation:
        return play(environment, episode=Episode("r", 1, "?", extra=extra))[0]

    assert [tool["function"]["name"] for tool in starting(tools=["two"]).tools or ()] == ["two"]
    assert [tool["function"]["name"] for tool in starting(tool_selection=["one"]).tools or ()] == ["one"]
    assert [tool["function"]["name"] for tool in starting(tools=[schema("two")]).tools or ()] == ["two"]
    assert starting(tools=[]) == Observation()
    with pytest.raises(UserError, match=r"names 'tow'.*did you mean 'two'"):
        starting(tools=["tow"])
    with pytest.raises(UserError, match="should be a list of names"):
        starting(tools="two")
    with pytest.raises(UserError, match="tools_kwargs names 'three'"):
        starting(tools_kwargs={"three": {}})
    with pytest.raises(UserError, match="create_kwargs"):
        starting(tools_kwargs={"one": 3})
    assert (
        starting(tools_kwargs={"one": None, "three": None}).tools is not None
    )  # columns of parquet are filled with null


def test_without_tools_in_the_template_a_system_text_lists_them_and_the_user_brings_results() -> None:
    environment = ToolEnvironment([echo()], "gemma3")
    answer = said('```tool_code\necho(text="a {b}")\necho(text="c")\n```')
    start, seen = play(environment, answer)
    assert [message["role"] for message in start.messages] == ["system", "user"]
    assert '"name": "echo"' in start.messages[0]["content"]
    assert start.tools is None
    assert seen.messages == ({"role": "user", "content": "```tool_output\na {b}\n```\n```tool_output\nc\n```"},)
    content = seen.messages[0]["content"]
    assert [(role, content[start:end]) for role, start, end, _ in seen.bodies] == [("tool", "a {b}"), ("tool", "c")]
    kind = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "?"}]
    start = play(environment, episode=Episode("r", 1, kind))[0]
    assert start.messages[0]["content"].startswith("Be kind.\n\nYou can call these tools.")
    assert len(start.messages) == 2
    start, _ = play(ToolEnvironment([echo()], "hermes", tools_in_template=False), calls(("echo", {"text": "x"})))
    assert "<tool_call>" in start.messages[0]["content"]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="two tools have the name 'echo'"):
        ToolEnvironment([echo(), echo()], "hermes")
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        ToolEnvironment([], "hermse")
    with pytest.raises(UserError, match="max_calls=0"):
        ToolEnvironment([], "hermes", max_calls=0)
    with pytest.raises(UserError, match="on_error='ignore': expected observe or fail"):
        ToolEnvironment([], "hermes", on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="rewards='both'"):
        ToolEnvironment([], "hermes", rewards="both")  # type: ignore[arg-type]


# --- tools in worker processes ------------------------------------------------------------------------------------------


class FakeRemote:
    """Stands for an object in a worker process. `script` says how its calls end."""

    def __init__(self, number: int, script: list[Any]) -> None:
        self.number, self.script, self.is_closed = number, script, False
        self.received: list[tuple[Any, ...]] = []

    async def call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        self.received.append((method, *arguments))
        await asyncio.sleep(0)
        wanted = self.script.pop(0) if self.script else f"object {self.number}"
        if isinstance(wanted, Exception):
            raise wanted
        return wanted

    async def close(self) -> None:
        self.is_closed = True


def remote_tool(*scripts: list[Any], is_stateful: bool = False) -> tuple[RemoteTool, list[FakeRemote]]:
    pytest.importorskip("burnish.environments.workers")
    opened: list[FakeRemote] = []

    async def open_remote() -> FakeRemote:
        opened.append(FakeRemote(len(opened), scripts[len(opened)] if len(opened) < len(scripts) else []))
        return opened[-1]

    return RemoteTool(schema("remote"), open_remote, is_stateful, max_objects=2), opened


def call_failed(kind: Any) -> Exception:
    workers = pytest.importorskip("burnish.environments.workers")
    return workers.CallFailed(kind, f"it {kind}", "trace")


CALL = ("remote", {"a": 1})


def test_a_stateless_tool_is_called_again_elsewhere_if_its_process_dies() -> None:
    tool, opened = remote_tool([call_failed("died")], ["ok"])
    _, seen = play(ToolEnvironment([tool], "hermes"), calls(CALL))
    assert contents(seen) == ["ok"]
    assert [remote.received for remote in opened] == [[("call", {"a": 1})], [("call", {"a": 1})]]
    assert [remote.is_closed for remote in opened] == [True, False]
    tool, _ = remote_tool([call_failed("died")], [call_failed("died")])
    with pytest.raises(EpisodeFailed, match="tool 'remote': it died") as failure:
        play(ToolEnvironment([tool], "hermes"), calls(CALL))
    assert failure.value.kind == "worker_died"


def test_an_object_that_hung_gets_no_more_calls() -> None:
    tool, opened = remote_tool([call_failed("timed_out")], ["ok"])
    _, first, second = play(ToolEnvironment([tool], "hermes"), calls(CALL), calls(CALL))
    assert contents(first) == ["Error: remote timed out after 30 s"]
    assert contents(second) == ["ok"]
    assert opened[0].is_closed


def test_calls_of_a_stateless_tool_are_spread_over_its_objects() -> None:
    tool, opened = remote_tool()
    environment = ToolEnvironment([tool], "hermes")
    _, seen = play(environment, calls(*[CALL] * 4))
    assert contents(seen) == ["object 0", "object 1", "object 0", "object 1"]
    play(environment, calls(CALL))
    assert len(opened) == 2  # another episode uses the same objects
    asyncio.run(tool.close())
    assert all(remote.is_closed for remote in opened)


def test_first_calls_that_come_at_once_open_no_more_objects_than_allowed() -> None:
    tool, opened = remote_tool()
    open_now, num_failures = tool._open_remote, 1

    async def open_slowly() -> Any:
        nonlocal num_failures
        await asyncio.sleep(0)
        if num_failures:
            num_failures -= 1
            raise call_failed("raised")
        return await open_now()

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(tool.call_shared({}, 1.0) for _ in range(20)), return_exceptions=True)

    tool._open_remote = open_slowly
    found = asyncio.run(scenario())
    assert len(opened) == 2
    assert sum(isinstance(one, Exception) for one in found) == 1  # the others wait for an object that opens


def test_a_stateful_tool_in_a_worker_lives_in_its_episode_and_dies_with_it() -> None:
    tool, opened = remote_tool([None, ToolResult("1", 0.5), 2.0], [None, call_failed("died")], is_stateful=True)
    environment = ToolEnvironment([tool], "hermes", rewards="tools")
    _, seen, end = play(environment, calls(CALL), said("Done."))
    assert (contents(seen), seen.reward, end.reward) == (["1"], 0.5, 2.0)
    assert [received[0] for received in opened[0].received] == ["start", "call", "end"]
    assert opened[0].received[0] == ("start", EPISODE, {})
    assert opened[0].is_closed
    with pytest.raises(EpisodeFailed) as failure:
        play(environment, calls(CALL))
    assert (failure.value.kind, failure.value.traceback) == ("worker_died", "trace")
    assert opened[1].is_closed


def test_what_a_worker_cannot_send_is_text_and_an_event() -> None:
    tool, _ = remote_tool([call_failed("bad_reply")])
    _, seen = play(ToolEnvironment([tool], "hermes"), calls(CALL))
    assert contents(seen) == ["Error: it bad_reply"]
    assert [event.kind for event in seen.events] == ["bad_reply"]
