"""Tools in verl's conventions, with stand-ins for verl's modules."""

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.plugins import load_plugin
from burnish.environments.adapters import verl_modules
from burnish.environments.adapters.verl import VerlEnvironment, VerlFunctionTool, VerlTool, read_tool_config
from burnish.environments.base import End
from burnish.environments.tools.base import ToolResult
from tests.environments.adapters.episodes import USER_FILES, call, contents, episode, play, rewards


def verl(**options: Any) -> VerlEnvironment:
    return VerlEnvironment(base=USER_FILES, **options)


def counter(cls: str = "Counter", **options: Any) -> VerlTool:
    return VerlTool(f"verl_old.py:{cls}", base=USER_FILES, **options)


def life_of_old_tools() -> list[tuple[str, Any, Any]]:
    life: list[tuple[str, Any, Any]] = load_plugin("verl_old.py:LIFE", USER_FILES)
    return life


def test_state_lives_for_one_call_as_in_verl_0_9():
    row = episode(tools_kwargs={"ledger": {"create_kwargs": {"start": 3}}})
    two = call("ledger", amount=4) + call("ledger", amount=7)
    seen = play(verl(tool_config_path="verl_tools.yaml"), row, two, "Done.")
    assert [tool["function"]["name"] for tool in seen[0].tools] == ["ledger"]
    assert contents(seen[1]) == ["7", "10"]
    assert seen[1].metrics == {"ledger/total": 17.0, "ledger/reward": 0.0}
    assert seen[2] == End()  # rewards of tools are ignored, as by verl's reward manager


def test_state_lives_for_a_trajectory_and_calc_reward_is_asked():
    environment = verl(tool_config_path="verl_tools.yaml", instance="trajectory", tool_rewards="turn")
    row = episode(tools_kwargs={"ledger": {"create_kwargs": {"start": 3}}})
    seen = play(environment, row, call("ledger", amount=3), call("ledger", amount=4), "Done.")
    assert [contents(item) for item in seen[1:3]] == [["6"], ["10"]]
    assert seen[3] == End(reward=1.0, metrics={"ledger/calc_reward": 1.0})


def test_nested_extra_info_gives_arguments_too():
    row = episode(extra_info={"tools_kwargs": {"ledger": {"create_kwargs": {"start": 5}}}})
    seen = play(verl(tool_config_path="verl_tools.yaml"), row, call("ledger", amount=1))
    assert contents(seen[1]) == ["6"]


def test_older_class_gets_its_arguments_spread_and_is_released():
    async def run() -> tuple[ToolResult, float | None]:
        tool = counter(instance="trajectory", tool_rewards="turn")
        await tool.start(episode(), {"create_kwargs": {"target": 6}, "execute_kwargs": {"scale": 3}})
        result = await tool.call({"by": 2})
        score = await tool.end()
        await tool.close()
        return result, score

    result, score = asyncio.run(run())
    assert result == ToolResult("count is 6", -0.1, {"count/count": 6.0, "count/reward": -0.1})
    assert score == 1.0
    assert life_of_old_tools() == [("create", "rows/0#0.0", 6), ("release", "rows/0#0.0", 6)]


def test_episode_without_a_call_is_scored_on_a_fresh_instance():
    async def run() -> float | None:
        tool = counter(instance="trajectory", tool_rewards="turn")
        await tool.start(episode(), {"create_kwargs": {"target": 0}})
        score = await tool.end()
        await tool.close()
        return score

    assert asyncio.run(run()) == 1.0
    assert [event for event, _, _ in life_of_old_tools()] == ["create", "release"]


def test_instance_is_released_if_execute_raises():
    async def run() -> None:
        tool = counter()
        await tool.start(episode(), {})
        with pytest.raises(KeyError):
            await tool.call({})

    asyncio.run(run())
    assert life_of_old_tools() == [("create", None, None), ("release", None, 0)]


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "(truncated)...cdefghij"),
        ("right", "abcdefgh...(truncated)"),
        ("middle", "abcd...(truncated)...ghij"),
    ],
)
def test_long_responses_are_cut_and_counted(side: str, text: str):
    options = {"max_tool_response_length": 8, "tool_response_truncate_side": side, "instance": "trajectory"}

    async def run() -> list[ToolResult]:
        tool = counter("Talker", **options)
        await tool.start(episode(), {})
        return [await tool.call({"by": by}) for by in (0, 1)]

    short, long = asyncio.run(run())
    assert short.text == ""
    assert long == ToolResult(text, None, {"count/reward": 0.0, "count/cut": 1.0})


def test_cut_response_is_an_event():
    environment = verl(tool_config_path="verl_tools.yaml", max_tool_response_length=2)
    seen = play(environment, episode(), call("ledger", amount=12345))
    assert contents(seen[1]) == ["1...(truncated)...5"]
    assert [(event.kind, event.what) for event in seen[1].events] == [("tool_cut", "ledger")]


def test_function_tool_returns_json_and_a_reward():
    environment = verl(function_tool_path="verl_functions.py", tool_rewards="turn")
    seen = play(environment, episode(), call("lookup", word="ox", limit=1) + call("lookup", word=3, limit="x"), "Done.")
    texts = contents(seen[1])
    assert texts[0] == '{"word": "ox", "lines": ["..."]}'
    assert texts[1].startswith("Error in tool 'lookup': can't multiply")
    assert rewards(seen) == [0.0, 0.0]
    with pytest.raises(UserError, match="registers no function tool 'lokup'; did you mean 'lookup'"):
        VerlFunctionTool("verl_functions.py", "lokup", base=USER_FILES)


def test_row_selects_tools():
    environment = verl(tool_config_path="verl_tools.yaml", function_tool_path="verl_functions.py")
    seen = play(environment, episode(tool_selection=["lookup"]), call("ledger", amount=1))
    assert [tool["function"]["name"] for tool in seen[0].tools] == ["lookup"]
    assert seen[1].events[0].kind == "tool_unknown"
    with pytest.raises(UserError, match="tool_selection names 'legder'; did you mean 'ledger'"):
        play(environment, episode(tool_selection=["legder"]))


def test_calls_past_max_parallel_calls_are_named():
    environment = verl(tool_config_path="verl_tools.yaml", max_parallel_calls=1)
    seen = play(environment, episode(), call("ledger", amount=1) + call("ledger", amount=2))
    assert contents(seen[1]) == ["1", "Error in tool 'ledger': not run: at most 1 call(s) in one answer"]


def test_tool_that_is_not_native_is_refused(tmp_path):
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: a.B\n    config: {type: mcp}\n")
    with pytest.raises(UserError, match=r"tools.yaml, tool 1: config.type is 'mcp'"):
        read_tool_config("tools.yaml", str(tmp_path))


def test_images_stand_behind_the_text_and_videos_are_refused():
    async def run(**media: Any) -> ToolResult:
        return counter().options.result("count", verl_modules.ToolResponse(text="a", **media), 0.0, {})

    found = asyncio.run(run(image=["pixels"]))
    assert (found.text, found.images) == ("a", ("pixels",))
    with pytest.raises(UserError, match="returned a video"):
        asyncio.run(run(video=["frames"]))


def test_stand_ins_are_installed_only_without_verl(monkeypatch):
    real = ModuleType("verl")
    monkeypatch.setitem(sys.modules, "verl", real)
    verl_modules.install()
    assert sys.modules["verl"] is real
    assert "verl.tools.schemas" not in sys.modules
