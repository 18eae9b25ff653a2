"""Builds the tools that a config names, and the environments that call them.

A `ToolBox` belongs to a run. It holds one handle for each tool; objects of tools from files live in the worker processes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config.environment import Environment as EnvironmentConfig
from burnish.config.environment import ToolEntry
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import check_options
from burnish.environments.base import Environment
from burnish.environments.tools.base import Tool
from burnish.environments.tools.built_in import BUILT_IN, MCP, make_tool
from burnish.environments.tools.call_formats import call_format, detect_format
from burnish.environments.tools.episode_tools import EpisodeTools, ToolLimits
from burnish.environments.tools.function_tool import FunctionTool
from burnish.environments.tools.mcp_client import McpServer
from burnish.environments.tools.python_tool import PythonTool
from burnish.environments.tools.tag_environment import PRESETS, TagEnvironment, TagOptions, tag_options
from burnish.environments.tools.tool_environment import ToolEnvironment
from burnish.environments.tools.tool_handles import LocalTool, Remote, RemoteTool, ToolHandle
from burnish.environments.workers import ObjectSpec, ObjectWorkers
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.code_reward import check_sandbox

TOOLS_PACKAGE = "burnish.environments.tools"
TAGS = "tags"
TAG_SYSTEMS = (TAGS, *PRESETS)
"""Environments whose tools are called with tags: `tags` with all options, and published systems by name."""
ENVIRONMENT_OPTIONS = ("max_parallel_calls", "max_result_chars", "on_error", "rewards")
"""Options of all environments with tools."""
OpenWorkers = Callable[[], Awaitable[ObjectWorkers]]
"""Returns the worker processes; the first call starts them."""


@dataclass(frozen=True)
class _ToolSpec:
    """A configured tool, before there are workers."""

    entry: ToolEntry
    path: str
    options: dict[str, Any]
    first: Tool
    """An object in this process: its schema, and the tool itself if it runs in the event loop."""


class ToolBox:
    """The tools of a config. `handles` may be called once the event loop runs."""

    def __init__(self, config: EnvironmentConfig, base: Any, num_workers: int) -> None:
        """Load every tool once, so that wrong names, options and functions are errors before anything is sampled."""
        self.config, self.base, self.num_workers = config, None if base is None else str(base), num_workers
        entries = config.tools
        self._servers = [_mcp_server(entry, self.base) for entry in entries if entry.name == MCP]
        self._specs = [_tool_spec(entry, self.base) for entry in entries if entry.name != MCP]
        self._handles: list[ToolHandle] | None = None
        self._lock = asyncio.Lock()

    async def handles(self, workers: OpenWorkers) -> list[ToolHandle]:
        """Return a handle for each tool. MCP servers are asked for theirs."""
        async with self._lock:  # episodes that start at once must share the handles, and ask each server once
            if self._handles is None:
                found: list[ToolHandle] = [self._handle(spec, workers) for spec in self._specs]
                for server in self._servers:
                    await server.list_tools()
                    found += [_mcp_handle(server, index) for index in range(len(server.make_tools()))]
                self._handles = found
            return self._handles

    async def aclose(self) -> None:
        """End the MCP servers. Objects in worker processes end with those."""
        for server in self._servers:
            await server.aclose()

    @property
    def names(self) -> list[str]:
        """The names of the tools that are known before the servers are asked."""
        return [spec.first.name for spec in self._specs]

    def _handle(self, spec: _ToolSpec, workers: OpenWorkers) -> ToolHandle:
        if spec.first.runs_in != "worker":
            cls = type(spec.first)
            return LocalTool(lambda: cls(**spec.options))
        remote = ObjectSpec(spec.path, spec.options, self.base)

        async def open_remote() -> Remote:
            return await (await workers()).open(remote)

        return RemoteTool(spec.first.schema, open_remote, spec.first.is_stateful, self.num_workers)


def _mcp_server(entry: ToolEntry, base: str | None) -> McpServer:
    check_options(McpServer, entry.options, "tool mcp")
    return McpServer(**{"base": base, **entry.options})


def _mcp_handle(server: McpServer, index: int) -> ToolHandle:
    return LocalTool(lambda: server.make_tools()[index], lambda episode: server.make_tools(episode)[index])


def _tool_spec(entry: ToolEntry, base: str | None) -> _ToolSpec:
    first = make_tool(entry.name, entry.options, base)
    if isinstance(first, FunctionTool):
        kind = "FunctionTool" if inspect.iscoroutinefunction(first.function) else "BlockingFunctionTool"
        return _ToolSpec(entry, f"{TOOLS_PACKAGE}.function_tool:{kind}", {"target": entry.name}, first)
    if isinstance(first, PythonTool):
        check_sandbox(first.is_isolated)
    options = dict(entry.options)
    if "base" in inspect.signature(type(first)).parameters:
        options.setdefault("base", base)
    path = f"{TOOLS_PACKAGE}.{BUILT_IN[entry.name]}" if entry.name in BUILT_IN else entry.name
    return _ToolSpec(entry, path, options, first)


class _LazyToolEnvironment(Environment):
    """An environment whose tools are opened with its first episode, inside the event loop."""

    runs_in = "loop"

    def __init__(self, make: Callable[[Sequence[ToolHandle]], Environment], box: ToolBox, workers: OpenWorkers) -> None:
        self._make, self._box, self._workers = make, box, workers
        self._inner: Environment | None = None

    async def start(self, episode: Any) -> Any:
        self._inner = self._make(await self._box.handles(self._workers))
        return await self._inner.start(episode)

    async def step(self, answer: Any) -> Any:
        assert self._inner is not None, "`start` comes first"
        return await self._inner.step(answer)

    async def end(self, reason: Any) -> Any:
        assert self._inner is not None, "`start` comes first"
        return await self._inner.end(reason)

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()


def tool_environment_maker(
    config: EnvironmentConfig, tokenizer: Tokenizer, base: Any, num_workers: int
) -> tuple[Callable[[OpenWorkers], Environment], Callable[[], Awaitable[None]]]:
    """Return a function that makes the configured environment with tools, given the workers, and one that ends its MCP servers.

    Everything is checked here.
    """
    box = ToolBox(config, base, num_workers)
    make = _tool_maker(config, tokenizer, box) if config.name == "tools" else _tag_maker(config, tokenizer, box)
    return lambda workers: _LazyToolEnvironment(make, box, workers), box.aclose


def _tool_maker(
    config: EnvironmentConfig, tokenizer: Tokenizer, box: ToolBox
) -> Callable[[Sequence[ToolHandle]], Environment]:
    if not config.tools:
        raise UserError("environment tools has no tools: list them in environment.tools")
    written = call_format(config.call_format if config.call_format != "auto" else detect_format(tokenizer))
    options = _checked_options(config, (*ENVIRONMENT_OPTIONS, "tools_in_template"))
    lists_tools = tokenizer.has_chat_template and tokenizer.chat_template_mentions("tools")
    shared = {
        "max_calls": config.max_calls,
        "deadline_s": config.deadline_s,
        "tools_in_template": lists_tools and written.is_in_template,
        **options,
    }
    ToolEnvironment([], written, **shared)  # checks the options
    return lambda handles: ToolEnvironment(handles, written, **shared)


def _tag_maker(
    config: EnvironmentConfig, tokenizer: Tokenizer, box: ToolBox
) -> Callable[[Sequence[ToolHandle]], Environment]:
    if config.call_format != "auto":
        raise UserError(f"environment.call_format has no effect on {config.name}, whose calls are tags")
    known = tuple(TagOptions.__dataclass_fields__)
    options = _checked_options(config, (*ENVIRONMENT_OPTIONS, *known))
    shared = {key: options.pop(key) for key in ENVIRONMENT_OPTIONS if key in options and key != "max_parallel_calls"}
    limits = ToolLimits(max_result_chars=shared.pop("max_result_chars", ToolLimits.max_result_chars))
    EpisodeTools([], limits, **shared)  # checks the options
    shared["max_result_chars"] = limits.max_result_chars
    if config.max_calls is not None:
        options["max_calls"] = config.max_calls
    tags = tag_options(None if config.name == TAGS else config.name, options)
    missing = [action.tool for action in tags.actions if action.tool not in box.names]
    if missing and not box._servers:
        raise UserError(
            f"environment {config.name}: its tag {tags.actions[0].open} calls the tool {missing[0]!r}; list it in environment.tools (there: "
            f"{', '.join(box.names) or 'none'}), or give a tool that name with options.name={missing[0]}"
        )
    cut = None if tags.max_observation_tokens is None else token_cutter(tokenizer, tags.max_observation_tokens)
    return lambda handles: TagEnvironment(handles, tags, deadline_s=config.deadline_s, cut=cut, **shared)


def token_cutter(tokenizer: Tokenizer, most: int) -> Callable[[str], str]:
    """Return a function that shortens a text to a number of tokens, with a mark where it was cut."""

    def cut(text: str) -> str:
        tokens = tokenizer.encode(tokenizer.literal(text))
        return text if len(tokens) <= most else tokenizer.decode(tokens[:most]) + " ..."

    return cut


def _checked_options(config: EnvironmentConfig, known: Sequence[str]) -> dict[str, Any]:
    for key in config.options:
        if key not in known:
            raise unknown_name_error(f"option of environment {config.name}", key, list(known))
    return dict(config.options)
