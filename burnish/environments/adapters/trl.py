"""Environments and tools written for TRL's GRPO trainer: classes for `environment_factory` and functions for `tools`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from burnish.config.errors import UserError, did_you_mean
from burnish.data.row import Message
from burnish.environments.adapters.tool_calls import (
    CallableTool,
    CallLimits,
    format_named,
    opening_with_tools,
    parse_calls,
    run_calls,
)
from burnish.environments.adapters.user_code import (
    checked_content,
    finite,
    load_target,
    prompt_messages,
    row_columns,
)
from burnish.environments.adapters.user_thread import UserThread
from burnish.environments.base import Answer, End, Environment, Episode, Observation
from burnish.environments.image_values import joined_content, split_parts
from burnish.environments.tools.base import ToolResult
from burnish.environments.tools.function_tool import function_schema

NOT_TOOLS = ("reset", "get_reward")
SINGLE = ""
"""The key of the factory if there is only one."""


class TrlEnvironment(Environment):
    """Plays a class that was written for TRL's `environment_factory`, or plain functions for its `tools`.

    Accepts:

    - `target`: a factory without arguments, or a mapping of names to factories. The row's column `environment` then chooses one.
    - `reset(**row)`, sync or async. Its text, or its content parts with images, are appended to the content of the row's last message, without a separator.
    - Every public method but `reset` and `get_reward` is a tool. Its schema comes from type hints and a Google docstring, as
      `transformers.utils.get_json_schema` makes it.
    - `get_reward()`, sync or async, is the reward of the episode. Without it the configured reward scores the episode.
    - `tools`: functions by plug-in name, beside or instead of a target.

    An object is used for one episode after another, as in TRL, so `reset` must clear everything. Results of calls stay in the order of the
    calls; TRL puts those of async tools last.

    Refuses: methods without type hints or descriptions, videos in results, a reward that is not a finite number. A reward function that
    reads TRL's `environments` argument has no such argument here: write `get_reward` instead.
    """

    is_reusable = True

    def __init__(
        self,
        target: str | Mapping[str, str] | None = None,
        *,
        tools: Sequence[str] = (),
        format: str = "hermes",
        max_calls: int | None = None,
        base: str | None = None,
    ) -> None:
        if target is None and not tools:
            raise UserError("TRL environment: give target (a class), tools (functions), or both")
        targets = {SINGLE: target} if isinstance(target, str) else dict(target or {})
        packages = {"trl": "trl", "datasets": "datasets", "openenv": "openenv"}
        self.factories = {name: load_target(spec, base, packages) for name, spec in targets.items()}
        self.is_chosen_by_row = target is not None and not isinstance(target, str)
        self.format = format_named(format).name
        self.thread = UserThread()
        self.max_calls = max_calls
        # The import takes seconds, which belong to the construction and not to the first episode.
        importlib.import_module("transformers.utils.chat_template_utils")
        self.functions = tools_of_functions([load_target(spec, base, packages) for spec in tools], self.thread)
        self.instances: dict[str, Any] = {}
        self.instance: Any = None
        self.tools: dict[str, CallableTool] = {}
        self.limits = CallLimits(max_calls)

    async def start(self, episode: Episode) -> Observation:
        columns = row_columns(episode)
        self.limits = CallLimits(self.max_calls)
        self.tools = dict(self.functions)
        messages = prompt_messages(episode.prompt) or [{"role": "user", "content": ""}]
        if self.factories:
            self.instance = await self._instance(columns, episode.id)
            for name, tool in tools_of_instance(self.instance, self.thread).items():
                if name in self.tools:
                    raise UserError(
                        f"TRL environment {type(self.instance).__name__}: the method {name!r} and a function in tools have the same name"
                    )
                self.tools[name] = tool
            said = await self.thread.call(self.instance.reset, **columns)
            if said is not None:
                messages = _append(messages, said, type(self.instance).__name__)
        return opening_with_tools(self.format, messages, self.tools)

    async def step(self, answer: Answer) -> Observation | End:
        calls = parse_calls(self.format, answer, self.tools)
        if not calls:
            return await self._end()
        done = await run_calls(calls, self.tools, self.limits, lambda _, reason: str({"error": reason}), self.format)
        return Observation(messages=done.messages, metrics=done.metrics, events=done.events)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return await self._end()

    async def _end(self) -> End:
        if self.instance is None or not callable(getattr(self.instance, "get_reward", None)):
            return End()
        reward = await self.thread.call(self.instance.get_reward)
        return End(reward=finite(reward, f"{type(self.instance).__name__}.get_reward"))

    async def _instance(self, columns: dict[str, Any], episode_id: str) -> Any:
        """The instance for this row. TRL does not pass the column that chose it to `reset`."""
        name = SINGLE
        if self.is_chosen_by_row:
            name = columns.pop("environment", None)
            if name not in self.factories:
                raise UserError(
                    f"episode {episode_id}: the row's column 'environment' is {name!r}{did_you_mean(str(name), self.factories)} "
                    f"(target has: {', '.join(self.factories)})"
                )
        if name not in self.instances:
            instance = await self.thread.call(self.factories[name])
            if not inspect.isfunction(getattr(type(instance), "reset", None)):
                raise UserError(
                    f"TRL environment {type(instance).__name__} has no method reset(**row), which TRL calls before each episode"
                )
            self.instances[name] = instance
        return self.instances[name]


def tools_of_instance(instance: Any, thread: UserThread) -> dict[str, CallableTool]:
    """The tools of an environment: every public function of its class but `reset` and `get_reward`, bound to the instance."""
    # The functions are listed on the class, because listing on the instance evaluates properties.
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    public = [name for name in names if name not in NOT_TOOLS and not name.startswith("_")]
    return tools_of_functions([getattr(instance, name) for name in public], thread)


def tools_of_functions(functions: Sequence[Callable[..., Any]], thread: UserThread) -> dict[str, CallableTool]:
    """Functions as tools, by their `__name__`. Sync ones run in the thread, one after another."""
    tools: dict[str, CallableTool] = {}
    for function in functions:
        schema = function_schema(function, getattr(function, "__qualname__", repr(function)))
        name = str(schema["function"]["name"])
        if name in tools:
            raise UserError(f"two tools are called {name!r}; rename one of the functions")
        tools[name] = CallableTool(schema, _caller(function, name, thread), inspect.iscoroutinefunction(function))
    return tools


def _caller(function: Callable[..., Any], name: str, thread: UserThread) -> Callable[[dict[str, Any]], Any]:
    async def call(arguments: dict[str, Any]) -> ToolResult:
        result = await thread.call(function, **arguments)
        is_parts = isinstance(result, list) and all(isinstance(part, dict) and "type" in part for part in result)
        where = f"the result of tool {name}"
        content = checked_content(result, where) if is_parts else str(result)
        if isinstance(content, str):
            return ToolResult(content)
        text, images = split_parts(content, where)
        return ToolResult(text, images=images)

    return call


def _append(messages: list[Message], said: Any, name: str) -> list[Message]:
    """Append what `reset` returned to the content of the last message. The messages of the row stay as they are."""
    last = messages[-1]
    before, behind = checked_content(last["content"], "the row's last message"), checked_content(said, f"{name}.reset")
    return [*messages[:-1], {**last, "content": joined_content(before, behind)}]
