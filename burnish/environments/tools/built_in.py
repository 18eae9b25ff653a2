"""The table of built-in tools, and a command to try a tool.

python -m burnish.environments.tools.built_in python_session '{"code": "x = 2"}' '{"code": "x + 1"}'
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import check_options, is_plugin, load_plugin
from burnish.environments.base import Episode
from burnish.environments.tools.base import Tool, ToolResult

BUILT_IN = {
    "calculator": "calculator:Calculator",
    "image_crop": "image_tools:ImageCrop",
    "image_zoom": "image_tools:ImageZoom",
    "image_highlight": "image_tools:ImageHighlight",
    "image_mask": "image_tools:ImageMask",
    "python": "python_tool:PythonTool",
    "python_session": "python_tool:PythonSession",
    "search": "search_bm25:SearchBM25",
    "search_http": "search_http:SearchHTTP",
    "table_lookup": "table_lookup:TableLookup",
    "row_table_lookup": "table_lookup:RowTableLookup",
}
"""Module and class of each built-in tool. `mcp` is a server with several tools (burnish.environments.tools.mcp_client)."""
MCP = "mcp"


def tool_class(name: str, base: str | Path | None = None) -> Any:
    """The class of a tool: a built-in one, a class of a user's file, or a function (see `make_tool`)."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(f"burnish.environments.tools.{module}"), attribute)
    if not is_plugin(name):
        raise unknown_name_error("tool", name, [*BUILT_IN, MCP, "path/to/file.py:function"])
    return load_plugin(name, base)


def make_tool(name: str, options: Mapping[str, Any] | None = None, base: str | Path | None = None) -> Tool:
    """A tool by its name, `path/to/file.py:function` or `path/to/file.py:Class`. Relative paths in its options start at `base`."""
    from burnish.environments.tools.function_tool import FunctionTool

    found, options = tool_class(name, base), dict(options or {})
    if not (inspect.isclass(found) and issubclass(found, Tool)):
        if options:
            raise UserError(f"tool {name}: a function takes no options ({', '.join(options)})")
        return FunctionTool(name, base)
    check_options(found, options, f"tool {name}")
    if base is not None and "base" in inspect.signature(found).parameters:
        options.setdefault("base", str(base))
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise UserError(f"tool {name}: {error}") from error
    tool: Tool = found(**options)
    return tool


async def try_tool(tools: list[Tool], calls: list[dict[str, Any]], row: Mapping[str, Any]) -> None:
    """Print the schemas of tools, the results of calls to the first one, and the reward, as one episode."""
    for tool in tools:
        print(json.dumps(tool.schema["function"], indent=2, ensure_ascii=False))
        if tool.is_stateful:
            await tool.start(Episode("try#0.0", 0, ""), row)
    for arguments in calls:
        result = await tools[0].call(arguments)
        print(f"> {json.dumps(arguments, ensure_ascii=False)}")
        print(result.text if isinstance(result, ToolResult) else result)
    for tool in tools:
        if tool.is_stateful:
            reward = await tool.end()
            if reward is not None:
                print(f"reward of the episode: {reward}")
            await tool.close()


async def _try(name: str, options: dict[str, Any], calls: list[dict[str, Any]], row: dict[str, Any]) -> None:
    if name != MCP:
        await try_tool([make_tool(name, options)], calls, row)
        return
    from burnish.environments.tools.mcp_client import McpServer

    check_options(McpServer, options, f"tool {name}")
    server = McpServer(**options)
    try:
        await server.list_tools()
        await try_tool(list(server.make_tools()), calls, row)
    finally:
        await server.aclose()


def main() -> None:
    """Try a tool from the command line."""
    parser = argparse.ArgumentParser(prog="python -m burnish.environments.tools.built_in")
    parser.add_argument("name", help=f"{', '.join([*BUILT_IN, MCP])}, or path/to/file.py:function")
    parser.add_argument("calls", nargs="*", type=json.loads, help="arguments of each call, as JSON")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the tool, as JSON")
    parser.add_argument("--row", type=json.loads, default={}, help="what the row gives a stateful tool, as JSON")
    given = parser.parse_intermixed_args()
    try:
        asyncio.run(_try(given.name, given.options, given.calls, given.row))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
