"""Episodes with tags, as published systems play them."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from burnish.config.environment import Environment as EnvironmentConfig
from burnish.config.environment import ToolEntry
from burnish.config.errors import UserError
from burnish.environments.base import Answer, End, Episode, Observation, RunsIn
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.tag_environment import (
    PRESETS,
    ActionTag,
    TagEnvironment,
    TagOptions,
    find_action,
    tag_options,
)
from burnish.environments.tools.tool_handles import LocalTool
from burnish.environments.tools.tool_registry import tool_environment_maker
from burnish.models.tokenizer import Tokenizer


class Recorder(Tool):
    """Notes its calls and gives the results of a list."""

    runs_in: ClassVar[RunsIn] = "loop"

    def __init__(self, name: str, results: list[Any]) -> None:
        self.schema = {"type": "function", "function": {"name": name, "parameters": {}}}
        self.calls: list[dict[str, Any]] = []
        self.results = results

    async def call(self, arguments: dict[str, Any]) -> Any:
        self.calls.append(arguments)
        return self.results.pop(0) if self.results else "found"


def play(tool: Recorder, options: TagOptions, *answers: str, **others: Any) -> list[Any]:
    async def run() -> list[Any]:
        environment = TagEnvironment([LocalTool(lambda: tool)], options, **others)
        found: list[Any] = [await environment.start(Episode("r", 1, "Who?"))]
        for text in answers:
            found.append(await environment.step(Answer(text, text)))
        await environment.close()
        return found

    return asyncio.run(run())


def test_search_r1_plays_two_turns_with_search_and_one_without() -> None:
    tool = Recorder("search", ["Doc 1", "Doc 2"])
    search = "<think>hm</think><search> who </search>"
    start, first, second, end = play(tool, PRESETS["search_r1"], search, search, search)
    assert start == Observation(stop=("</search>", "</answer>"))
    assert first.text == "\n\n<information>Doc 1</information>\n\n"
    assert first.messages is None
    assert [first.text[start:end] for _, start, end, _ in first.bodies] == ["Doc 1"]
    assert first.metrics == {"tool_calls": 1, "tool_errors": 0}
    assert second.text == "\n\n<information>Doc 2</information>\n\n"
    assert end == End()
    assert tool.calls == [{"query": "who"}, {"query": "who"}]


def test_without_a_free_last_turn_the_last_search_is_not_made() -> None:
    tool = Recorder("search", [])
    options = tag_options("search_r1", {"is_last_turn_free": False})
    _, first, end = play(tool, options, "<search>a</search>", "<search>b</search>")
    assert isinstance(first, Observation)
    assert end == End()
    assert tool.calls == [{"query": "a"}]


def test_an_answer_ends_and_an_invalid_action_is_named() -> None:
    tool = Recorder("search", [])
    _, end = play(tool, PRESETS["search_r1"], "<answer>Paris</answer>")
    assert end == End()
    _, invalid, _, end = play(tool, PRESETS["search_r1"], "Paris", "<search>a</search>", "Paris")
    assert "<search>" in invalid.text
    assert "<answer>" in invalid.text
    assert invalid.metrics == {"invalid_actions": 1, "void_turns": 1}
    assert end == End(metrics={"void_turns": 1})  # the invalid turn counted
    _, end = play(tool, PRESETS["research"], "Paris")
    assert end == End(metrics={"void_turns": 1})  # no text for invalid actions


def test_the_first_complete_pair_counts() -> None:
    options = PRESETS["search_r1"]
    search = options.actions[0]
    assert find_action("<search>a</search> <answer>b</answer>", options) == (search, "a")
    assert find_action("<answer>b</answer><search>a</search>", options) == "answer"
    assert find_action("<search>a <answer>b</answer>", options) == "answer"
    assert find_action("<search>a", options) is None
    assert find_action("a</search>", options) is None


def test_retool_runs_the_code_in_the_fence() -> None:
    tool = Recorder("python", ["3\n", 1 / 2])
    code = "Let me see.\n<code>\n```python\nif True:\n    print(1 + 2)\n```\n</code>"
    start, seen, _ = play(tool, PRESETS["retool"], code, "<code>print(1)</code>")
    assert start.stop == ("</code>", "</answer>")
    assert seen.text == "\n<interpreter>\n3\n\n</interpreter>\n"
    assert tool.calls == [{"code": "if True:\n    print(1 + 2)"}, {"code": "print(1)"}]


def test_torl_runs_the_last_block_once_and_shows_the_last_line_of_an_error() -> None:
    tool = Recorder("python", ["Traceback (most recent call last):\n  File x\nNameError: y\n"])
    text = "```python\na\n```\nNo:\n```python\nb\n```\n```output"
    start, seen, spent, end = play(tool, PRESETS["torl"], text, text, "So it is \\boxed{3}.")
    assert start.stop == ("```output",)
    assert seen.text == "\nNameError: y\n```\n"
    assert tool.calls == [{"code": "b"}]
    assert spent.text == PRESETS["torl"].spent_text
    assert end == End()
    _, end = play(tool, PRESETS["torl"], "```python\na\n```")
    assert end == End()  # code that the model does not ask to run


@pytest.mark.parametrize(
    ("system", "text", "num_void"),
    [
        ("torl", "So it is \\boxed{3}.", 0),
        ("torl", "```python\na\n```", 0),
        ("torl", "```python\na", 1),
        ("torl", "I do not know", 1),
        ("retool", "<answer>\\boxed{3}</answer>", 0),
        ("retool", "\\boxed{3}", 1),
        ("search_r1", "hm", 1),
    ],
)
def test_a_turn_with_neither_code_nor_answer_is_void(system: str, text: str, num_void: int) -> None:
    tool = Recorder("search" if system == "search_r1" else "python", [])
    _, reply = play(tool, PRESETS[system], text)
    assert reply.metrics.get("void_turns", 0) == num_void


def test_calls_that_are_spent_end_the_episode_without_a_text_for_it() -> None:
    tool = Recorder("search", [])
    options = tag_options("research", {"max_calls": 1})
    _, _, end = play(tool, options, "<search>a</search>", "<search>b</search>")
    assert (end, len(tool.calls)) == (End(), 1)


def test_results_are_cut_and_failures_are_shown_inside_the_observation() -> None:
    tool = Recorder("search", ["abcdef"])
    _, seen = play(tool, PRESETS["research"], "<search>a</search>", cut=lambda text: text[:3])
    assert seen.text == "\n<result>\nabc\n</result>\n"
    assert [event.kind for event in seen.events] == ["tool_cut"]

    class Broken(Recorder):
        async def call(self, arguments: dict[str, Any]) -> Any:
            raise OSError("no index")

    _, seen = play(Broken("search", []), PRESETS["research"], "<search>a</search>")
    assert seen.text == "\n<result>\nError: OSError: no index\n</result>\n"
    assert [event.kind for event in seen.events] == ["tool_raised"]


def test_rewards_of_tools_count_if_asked_for() -> None:
    tool = Recorder("search", [ToolResult("x", 0.5)])
    _, seen, end = play(tool, PRESETS["research"], "<search>a</search>", "<answer>b</answer>", rewards="tools")
    assert (seen.reward, end.reward) == (0.5, 0.0)


def test_a_recipe_can_describe_a_system_of_its_own() -> None:
    action = {"open": "<calc>", "close": "</calc>", "tool": "calculator", "argument": "expression"}
    options = tag_options(None, {"actions": [action], "observation": "={result};", "answer": ["<final>", "</final>"]})
    assert options.actions == (ActionTag("<calc>", "</calc>", "calculator", "expression"),)
    tool = Recorder("calculator", ["3"])
    start, seen, end = play(tool, options, "<calc>1 + 2</calc>", "<final>3</final>")
    assert (start.stop, seen.text, end) == (("</calc>", "</final>"), "=3;", End())
    assert tool.calls == [{"expression": "1 + 2"}]


@pytest.mark.parametrize(
    ("system", "changes", "problem"),
    [
        ("serch_r1", {}, "did you mean 'search_r1'"),
        (None, {}, "needs actions"),
        ("research", {"max_turn": 1}, "did you mean 'max_turns'"),
        ("research", {"actions": [{"open": "<a>"}]}, "records with open, close"),
        ("research", {"actions": []}, "at least one action"),
        ("research", {"observation": "x"}, "has no {result}"),
        ("research", {"answer": ["<a>"]}, "two tags"),
        ("research", {"max_calls": 0}, "expected 1 or more"),
        ("research", {"is_last_turn_free": True}, "needs max_turns"),
        ("research", {"spent_text": "x"}, "needs max_calls"),
    ],
)
def test_wrong_options_are_refused(system: str | None, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        tag_options(system, changes)


def test_a_tag_whose_tool_is_missing_is_refused() -> None:
    with pytest.raises(UserError, match=r"<search> calls the tool 'search', which is not in environment\.tools"):
        TagEnvironment([LocalTool(lambda: Recorder("serach", []))], PRESETS["research"])


@pytest.mark.parametrize("wrong", [{"on_error": "ignore"}, {"rewards": "tool"}])
def test_wrong_options_of_the_tools_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match="expected"):
        TagEnvironment([LocalTool(lambda: Recorder("search", []))], PRESETS["search_r1"], **wrong)
    config = EnvironmentConfig(name="retool", tools=[ToolEntry(name="python")], options=wrong)
    with pytest.raises(UserError, match="expected"):  # before anything is sampled
        tool_environment_maker(config, Tokenizer.from_characters("ab"), None, 1)
