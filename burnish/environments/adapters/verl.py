"""Tools written for verl: `BaseTool` subclasses named in a tool YAML, and functions with `@function_tool`.

A row says in `extra_info.tools_kwargs.<tool>` what a tool gets (`create_kwargs`, `execute_kwargs`, `release_kwargs`), and in
`extra_info.tool_selection` which tools the model has.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from burnish.config.errors import UserError, did_you_mean
from burnish.data.row import Message
from burnish.environments.adapters import verl_modules
from burnish.environments.adapters.tool_calls import (
    CallableTool,
    CallLimits,
    format_named,
    opening_with_tools,
    parse_calls,
    run_calls,
)
from burnish.environments.adapters.user_code import accepts, awaited, finite, load_target, numbers, prompt_messages
from burnish.environments.adapters.user_thread import UserThread
from burnish.environments.base import Answer, End, Environment, Episode, Event, Observation
from burnish.environments.tools.base import Tool, ToolResult

Lifetime = Literal["call", "trajectory"]
TruncateSide = Literal["left", "middle", "right"]
ToolRewards = Literal["turn", "ignore"]
PACKAGES = {"verl": "verl"}
T = TypeVar("T")


@dataclass
class ResponseOptions:
    """What becomes of a tool's response."""

    max_tool_response_length: int | None = 256
    """Longer texts are cut to this many characters and marked; verl's default. None: never cut here."""
    tool_response_truncate_side: TruncateSide = "middle"
    """Which part is left out."""
    tool_rewards: ToolRewards = "ignore"
    """`turn`: the reward of a call belongs to the answer that made it. `ignore`: it is a metric only, as with verl's reward manager."""

    def __post_init__(self) -> None:
        if self.max_tool_response_length is not None and self.max_tool_response_length < 2:
            raise UserError(f"max_tool_response_length should be at least 2, got {self.max_tool_response_length}")
        if self.tool_response_truncate_side not in ("left", "middle", "right"):
            raise UserError(
                f"tool_response_truncate_side should be left, middle or right, got {self.tool_response_truncate_side!r}"
            )
        if self.tool_rewards not in ("turn", "ignore"):
            raise UserError(f"tool_rewards should be turn or ignore, got {self.tool_rewards!r}")

    def result(self, name: str, response: Any, reward: Any, metrics: Any) -> ToolResult:
        """Convert verl's triple. Videos are refused: a tool gives frames as images."""
        text = response if isinstance(response, str) else getattr(response, "text", None)
        images = tuple(getattr(response, "image", None) or ())
        if getattr(response, "video", None):
            raise UserError(f"verl tool {name!r} returned a video; let it return some frames as `image` instead")
        number = finite(0.0 if reward is None else reward, f"verl tool {name!r}")
        text, is_cut = self._cut(text or "")
        found = numbers(metrics, f"{name}/")
        found[f"{name}/reward"] = number
        if is_cut:
            found[f"{name}/cut"] = 1.0
        return ToolResult(text, number if self.tool_rewards == "turn" else None, found, images)

    def _cut(self, text: str) -> tuple[str, bool]:
        limit = self.max_tool_response_length
        if limit is None or len(text) <= limit:
            return text, False
        if self.tool_response_truncate_side == "left":
            return "(truncated)..." + text[-limit:], True
        if self.tool_response_truncate_side == "right":
            return text[:limit] + "...(truncated)", True
        half = limit // 2
        return text[:half] + "...(truncated)..." + text[-half:], True


@dataclass
class AgentData:
    """What `execute` gets as `agent_data`: the fields of verl's record that hold text and plain data."""

    messages: list[Message]
    request_id: str
    tools_kwargs: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlTool(Tool):
    """A `BaseTool` subclass of verl.

    Accepts a class with `__init__(config, tool_schema)`, `create`, `execute`, `calc_reward` and `release`. With `instance: call` the object
    is created and released around every call, and gets `create(create_kwargs={...})`, as verl 0.9.1 does. With `instance: trajectory`
    it is created once an episode, gets `create(id, **create_kwargs)`, and `calc_reward` is asked at the end, as older verl did. In
    both cases a signature that names `create_kwargs` gets the dictionary. An episode without a call is scored on a fresh instance.

    One object serves one episode, so a class may also keep its state on `self`. The classes load without verl (`verl_modules`).

    Images of a response (`ToolResponse.image`) stand behind its text. Refuses: videos, and rewards that are not finite.
    """

    is_stateful = True

    def __init__(
        self,
        class_name: str,
        *,
        config: Mapping[str, Any] | None = None,
        tool_schema: Mapping[str, Any] | None = None,
        instance: Lifetime = "call",
        max_tool_response_length: int | None = 256,
        tool_response_truncate_side: TruncateSide = "middle",
        tool_rewards: ToolRewards = "ignore",
        base: str | None = None,
    ) -> None:
        if instance not in ("call", "trajectory"):
            raise UserError(f"verl tool {class_name}: instance should be call or trajectory, got {instance!r}")
        verl_modules.install()
        from verl.tools.schemas import OpenAIFunctionToolSchema  # verl's, or the stand-in

        cls = load_target(_plugin_name(class_name), base, PACKAGES)
        given = None if tool_schema is None else OpenAIFunctionToolSchema.model_validate(dict(tool_schema))
        self.tool = cls(config=dict(config or {}), tool_schema=given)
        self.schema = tool_schema_dict(self.tool.tool_schema)
        self.instance = instance
        self.options = ResponseOptions(max_tool_response_length, tool_response_truncate_side, tool_rewards)
        self._row: dict[str, Any] = {}
        self._instance_id: Any = None
        self._episode_id = ""
        self.agent_data: AgentData | None = None

    async def start(self, episode: Episode, arguments: Mapping[str, Any]) -> None:
        self._row = dict(arguments)
        self._instance_id = None
        self._episode_id = episode.id
        self.agent_data = AgentData(prompt_messages(episode.prompt), episode.id, {self.name: self._row})

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        if self.instance == "trajectory":
            return await self._execute(await self._trajectory_instance(), arguments)
        instance_id = await self._create(None)
        try:
            return await self._execute(instance_id, arguments)
        finally:
            await self._release(instance_id)

    async def end(self) -> float | None:
        """Ask `calc_reward` with `instance: trajectory`; None if rewards of tools are ignored or instances live for one call."""
        is_asked = self.instance == "trajectory" and self.options.tool_rewards == "turn"
        return await self.calc_reward() if is_asked else None

    async def calc_reward(self) -> float:
        """The score of the episode's instance."""
        instance_id = await self._trajectory_instance()
        return finite(await awaited(self.tool.calc_reward(instance_id)), f"{type(self.tool).__name__}.calc_reward")

    async def close(self) -> None:
        if self._instance_id is not None:
            instance_id, self._instance_id = self._instance_id, None
            await self._release(instance_id)

    async def _trajectory_instance(self) -> Any:
        if self._instance_id is None:
            self._instance_id = await self._create(self._episode_id)
        return self._instance_id

    async def _create(self, instance_id: str | None) -> Any:
        values = dict(self._row.get("create_kwargs") or {})
        is_named = "create_kwargs" in inspect.signature(self.tool.create).parameters
        if is_named or (instance_id is None and accepts(self.tool.create, "create_kwargs")):
            values = {"create_kwargs": values}
        # verl 0.9.1 gives no id; older verl gives that of the request.
        made = await awaited(self.tool.create(*([] if instance_id is None else [instance_id]), **values))
        found = made[0] if isinstance(made, tuple) else made  # older classes return the id alone
        return instance_id if found is None else found

    async def _execute(self, instance_id: Any, arguments: dict[str, Any]) -> ToolResult:
        values = dict(self._row.get("execute_kwargs") or {})
        if accepts(self.tool.execute, "agent_data"):
            values["agent_data"] = self.agent_data
        response, reward, metrics = await awaited(self.tool.execute(instance_id, arguments, **values))
        result = self.options.result(self.name, response, reward, metrics)
        if self.agent_data is not None:
            self.agent_data.tool_rewards.append(result.metrics[f"{self.name}/reward"])
        return result

    async def _release(self, instance_id: Any) -> None:
        await awaited(self.tool.release(instance_id, **dict(self._row.get("release_kwargs") or {})))


class VerlFunctionTool(Tool):
    """A function that verl's `@function_tool` registered: `path` is its file, `function` the name of the tool.

    It returns a text, a dictionary (as JSON), a `ToolResponse`, or a tuple of one of these with a reward and metrics. Sync functions run
    in a thread, as in verl.
    """

    def __init__(
        self,
        path: str,
        function: str,
        *,
        max_tool_response_length: int | None = 256,
        tool_response_truncate_side: TruncateSide = "middle",
        tool_rewards: ToolRewards = "ignore",
        base: str | None = None,
    ) -> None:
        entries = _registered_functions(path, base)
        if function not in entries:
            raise UserError(
                f"{path} registers no function tool {function!r}{did_you_mean(function, entries)} (has: {', '.join(entries)})"
            )
        self.entry = entries[function]
        self.schema = tool_schema_dict(self.entry.tool_schema)
        self.options = ResponseOptions(max_tool_response_length, tool_response_truncate_side, tool_rewards)

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        returned = await UserThread().call(self.entry.fn, **arguments)  # a thread for each call: calls run together
        values = returned if isinstance(returned, tuple) else (returned,)
        if not 1 <= len(values) <= 3:
            raise TypeError(
                f"function tool {self.name!r} returned {len(values)} values; expected a response, then a reward, then metrics"
            )
        response, reward, metrics = (*values, None, None)[:3]
        if isinstance(response, dict):
            response = json.dumps(response, ensure_ascii=False)
        elif not isinstance(response, str) and not hasattr(response, "text"):
            response = str(response)
        return self.options.result(self.name, response, reward, metrics)


AnyVerlTool = VerlTool | VerlFunctionTool


class VerlEnvironment(Environment):
    """Lets the model call tools of verl, as its tool agent loop does. An answer without a call ends the episode.

    Accepts `tool_config_path` (the YAML), `function_tool_path` (a file of `@function_tool` functions), or both. The row chooses among the
    tools with `tool_selection` and gives arguments with `tools_kwargs`. With `tool_rewards: turn`, the rewards of calls are turn rewards
    and `calc_reward` is added at the end. With `ignore`, the default, the configured reward scores the episode.

    `max_parallel_calls` is the most calls in one answer. verl's default is 1 and drops further calls silently; here there is no limit by
    default, and a call that is not run gets a message that says so.

    Refuses: what `VerlTool` refuses, a `config.type` other than `native`, two tools of one name, and rows that select a tool that does not exist.
    """

    def __init__(
        self,
        *,
        tool_config_path: str | None = None,
        function_tool_path: str | None = None,
        format: str = "hermes",
        instance: Lifetime = "call",
        max_calls: int | None = None,
        max_parallel_calls: int | None = None,
        max_tool_response_length: int | None = 256,
        tool_response_truncate_side: TruncateSide = "middle",
        tool_rewards: ToolRewards = "ignore",
        base: str | None = None,
    ) -> None:
        if tool_config_path is None and function_tool_path is None:
            raise UserError("verl environment: give tool_config_path, function_tool_path, or both")
        responses: dict[str, Any] = {
            "max_tool_response_length": max_tool_response_length,
            "tool_response_truncate_side": tool_response_truncate_side,
            "tool_rewards": tool_rewards,
        }
        self.gives_rewards = tool_rewards == "turn"
        tools: list[AnyVerlTool] = []
        if tool_config_path is not None:
            for options in read_tool_config(tool_config_path, base):
                tools.append(VerlTool(**options, instance=instance, base=base, **responses))
        if function_tool_path is not None:
            for name in function_tool_names(function_tool_path, base):
                tools.append(VerlFunctionTool(function_tool_path, name, base=base, **responses))
        self.all_tools = {tool.name: tool for tool in tools}
        if len(self.all_tools) < len(tools):
            raise UserError(f"verl environment: two tools have one name among {', '.join(t.name for t in tools)}")
        self.format = format_named(format).name
        self.limit_options = (max_calls, max_parallel_calls)
        self.limits = CallLimits(*self.limit_options)
        self.tools: dict[str, AnyVerlTool] = {}
        self.callable: dict[str, CallableTool] = {}
        self.agent_data: AgentData | None = None

    async def start(self, episode: Episode) -> Observation:
        kwargs = tool_field(episode, "tools_kwargs") or {}
        self.tools = selected_tools(episode, self.all_tools)
        self.limits = CallLimits(*self.limit_options)
        self.agent_data = AgentData(prompt_messages(episode.prompt), episode.id, kwargs)
        self.callable = {
            name: CallableTool(tool.schema, tool.call, isinstance(tool, VerlFunctionTool))
            for name, tool in self.tools.items()
        }
        for name, tool in self.tools.items():
            if isinstance(tool, VerlTool):
                await tool.start(episode, kwargs.get(name) or {})
                tool.agent_data = self.agent_data  # all tools of an episode see the same record
        return opening_with_tools(self.format, prompt_messages(episode.prompt), self.callable)

    async def step(self, answer: Answer) -> Observation | End:
        assert self.agent_data is not None
        calls = parse_calls(self.format, answer, self.callable)
        self.agent_data.messages.append({"role": "assistant", "content": answer.text})
        if not calls:
            return await self._end()
        done = await run_calls(calls, self.callable, self.limits, _error_text, self.format)
        self.agent_data.messages.extend(done.messages)
        cut = [name for name in self.tools if f"{name}/cut" in done.metrics]
        limit = "max_tool_response_length"
        events = tuple(Event("tool_cut", name, f"the response is longer than {limit}") for name in cut)
        return Observation(
            messages=done.messages, reward=done.reward or 0.0, metrics=done.metrics, events=(*done.events, *events)
        )

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return await self._end()

    async def _end(self) -> End:
        scores = {}
        for name, tool in self.tools.items():
            if isinstance(tool, VerlTool) and tool.instance == "trajectory":
                scores[f"{name}/calc_reward"] = await tool.calc_reward()
        return End(reward=sum(scores.values(), 0.0) if self.gives_rewards else None, metrics=scores)

    async def close(self) -> None:
        for tool in self.tools.values():
            await tool.close()


# --- files and rows ---------------------------------------------------------------------------------------------------------


def read_tool_config(path: str, base: str | None = None) -> list[dict[str, Any]]:
    """The tools of verl's YAML, each as the options `class_name`, `config` and `tool_schema` of a `VerlTool`."""
    import yaml

    file = _existing_file(path, base)
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{file} should have a list `tools:` of entries with class_name, config and tool_schema")
    options = []
    for number, entry in enumerate(entries, start=1):
        where = f"{file}, tool {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise UserError(f"{where}: class_name should be a text such as pkg.module.Class")
        config = entry.get("config") or {}
        if config.get("type", "native") != "native":
            raise UserError(
                f"{where}: config.type is {config['type']!r}; verl runs `native` tools only, and so does burnish (for MCP servers use the tool mcp)"
            )
        options.append({"class_name": entry["class_name"], "config": config, "tool_schema": entry.get("tool_schema")})
    return options


def function_tool_names(path: str, base: str | None = None) -> list[str]:
    """The names of the function tools that a file registers."""
    return list(_registered_functions(path, base))


def tool_field(episode: Episode, key: str) -> Any:
    """A field of verl's `extra_info`. Rows in verl's format have its fields as columns; other rows may still have it nested."""
    if key in episode.extra:
        return episode.extra[key]
    nested = episode.extra.get("extra_info")
    return nested.get(key) if isinstance(nested, Mapping) else None


def selected_tools(episode: Episode, tools: Mapping[str, T]) -> dict[str, T]:
    """The tools that the row's `tool_selection` names, in its order; all of them without one."""
    names: Sequence[str] | None = tool_field(episode, "tool_selection")
    if not names:
        return dict(tools)
    for name in names:
        if name not in tools:
            raise UserError(
                f"episode {episode.id}: tool_selection names {name!r}{did_you_mean(name, tools)} (tools: {', '.join(tools)})"
            )
    return {name: tools[name] for name in names}


def tool_schema_dict(schema: Any) -> dict[str, Any]:
    """verl's schema record as a plain dictionary, without fields that were never set."""
    dumped: dict[str, Any] = schema.model_dump(exclude_unset=True, exclude_none=True)
    return dumped


def _registered_functions(path: str, base: str | None) -> dict[str, Any]:
    verl_modules.install()
    module_name = load_target(f"{path}:__name__", base, PACKAGES)
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY  # verl's, or the stand-in

    functions = {name: entry for name, entry in FUNCTION_TOOL_REGISTRY.items() if entry.fn.__module__ == module_name}
    if not functions:
        raise UserError(f"{sys.modules[module_name].__file__} registers no function with @function_tool")
    return functions


def _error_text(name: str, reason: str) -> str:
    return f"Error in tool {name!r}: {reason}"


def _plugin_name(class_name: str) -> str:
    """verl's `pkg.module.Class` as a plug-in name."""
    if ":" in class_name:
        return class_name
    module, _, cls = class_name.rpartition(".")
    if not module:
        raise UserError(f"verl tool: class_name {class_name!r} should have the form pkg.module.Class")
    return f"{module}:{cls}"


def _existing_file(path: str, base: str | None) -> Path:
    candidates = [Path(base or ".") / path, Path(path)]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise UserError(f"tool_config_path {path!r}: no such file (looked at {', '.join(map(str, candidates))})")
    return found
