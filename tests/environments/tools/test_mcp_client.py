"""Tools of MCP servers, over stdio and HTTP, with the real package where it is installed."""

from __future__ import annotations

import asyncio
import builtins
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.config.environment import Environment as EnvironmentConfig
from burnish.config.environment import ToolEntry
from burnish.config.errors import UserError
from burnish.environments.base import Episode
from burnish.environments.tools import mcp_client
from burnish.environments.tools.base import ToolResult
from burnish.environments.tools.mcp_client import McpServer, McpServerDied
from burnish.environments.tools.tool_registry import ToolBox

SERVER = '''
import os, sys
try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # before version 2
    from mcp.server.fastmcp import FastMCP as MCPServer

server, count = MCPServer("test"), 0

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def count_up() -> int:
    """Count the calls of this session."""
    global count
    count += 1
    return count

@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("no luck")

@server.tool()
def die() -> str:
    """End the server."""
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)

if len(sys.argv) == 1:
    server.run()
elif hasattr(server, "settings") and hasattr(server.settings, "port"):
    server.settings.port = int(sys.argv[1])
    server.run("streamable-http")
else:
    server.run("streamable-http", port=int(sys.argv[1]))
'''
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def program(tmp_path: Path) -> str:
    pytest.importorskip("mcp")
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture
def url(program: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, program, str(port)], env=os.environ | ENVIRONMENT) as process:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def text_of(result: ToolResult | str) -> str:
    return result.text if isinstance(result, ToolResult) else result


async def named_tools(server: McpServer) -> dict[str, Any]:
    await server.list_tools()
    return {tool.name: tool for tool in server.make_tools()}


def test_a_shared_stdio_server_answers_reports_errors_and_is_restarted(program: str) -> None:
    async def play() -> None:
        server = McpServer([sys.executable, program], env=ENVIRONMENT, sessions=1)
        try:
            tools = await named_tools(server)
            assert sorted(tools) == ["add", "count_up", "die", "fail"]
            parameters = tools["add"].schema["function"]["parameters"]
            assert {key: value["type"] for key, value in parameters["properties"].items()} == {
                "a": "integer",
                "b": "integer",
            }
            assert (tools["add"].runs_in, tools["add"].is_stateful) == ("loop", False)
            sums = await asyncio.gather(*(tools["add"].call({"a": 1, "b": str(n)}) for n in range(5)))
            assert sums == ["1", "2", "3", "4", "5"]
            failed = await tools["fail"].call({})
            assert failed.text.startswith("Error: Error executing tool fail")
            assert failed.metrics == {"tool/errors": 1.0}
            wrong = await tools["add"].call({"a": 1})
            assert wrong.text.startswith("Error: wrong arguments for add: 'b' is missing")
            with pytest.raises(McpServerDied, match="last words"):
                await tools["die"].call({})
            assert await tools["count_up"].call({}) == "1"
        finally:
            await server.aclose()

    asyncio.run(play())


def test_each_episode_has_a_session_that_its_tools_share_and_a_lost_one_is_not_replaced(program: str) -> None:
    async def play() -> None:
        server = McpServer(
            f"{sys.executable} {program}", env=ENVIRONMENT, session="episode", prefix="my_", tools=["count_up", "die"]
        )
        await server.list_tools()
        episodes = []
        for _ in range(2):
            tools = {tool.name: tool for tool in server.make_tools()}
            assert all(tool.is_stateful for tool in tools.values())
            for tool in tools.values():
                await tool.start(Episode("r#0.0", 0, ""), {})
            episodes.append(tools)
        counts = [await tools["my_count_up"].call({}) for tools in (episodes[0], episodes[0], episodes[1])]
        assert counts == ["1", "2", "1"]
        for _ in range(2):
            with pytest.raises(McpServerDied):
                await episodes[0]["my_die"].call({})
        assert await episodes[1]["my_count_up"].call({}) == "2"
        for tools in episodes:
            for tool in tools.values():
                await tool.close()
        assert server._episodes == set()

    asyncio.run(play())


def test_the_tools_of_an_environment_share_the_session_of_their_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tool of a run has a handle of its own. Episodes that start at once list the server's tools once."""
    monkeypatch.setattr(mcp_client, "import_mcp", lambda: None)
    num_listed = 0

    async def list_tools(server: McpServer) -> list[dict[str, Any]]:
        nonlocal num_listed
        num_listed += 1
        await asyncio.sleep(0)
        names = ("put", "get")
        server._schemas = {n: {"type": "function", "function": {"name": n, "parameters": {}}} for n in names}
        return list(server._schemas.values())

    monkeypatch.setattr(McpServer, "list_tools", list_tools)
    config = EnvironmentConfig(
        name="tools", tools=[ToolEntry(name="mcp", options={"command": "server", "session": "episode"})]
    )

    async def play() -> None:
        box = ToolBox(config, None, 1)
        lists = await asyncio.gather(*(box.handles(None) for _ in range(3)))  # type: ignore[arg-type]
        assert num_listed == 1
        put, get = lists[0]
        assert all(handles is lists[0] for handles in lists)
        first, second = Episode("r#0.0", 0, ""), Episode("r#0.0", 0, "")
        sessions = [await handle.open(e, {}, 1.0) for e in (first, second) for handle in (put, get)]
        own = [session.tool._own for session in sessions]  # type: ignore[attr-defined]
        assert own[0] is own[1]
        assert own[2] is own[3]
        assert own[0] is not own[2]
        for session in sessions:
            await session.close()
        assert box._servers[0]._episodes == set()

    asyncio.run(play())


def test_an_http_server_answers(url: str) -> None:
    async def play() -> None:
        server = McpServer(url=url, sessions=2, headers={"X-Key": "1"})
        try:
            tools = await named_tools(server)
            sums = await asyncio.gather(*(tools["add"].call({"a": 1, "b": n}) for n in range(5)))
            assert sums == ["1", "2", "3", "4", "5"]
            assert text_of(await tools["fail"].call({})).startswith("Error: Error executing tool fail")
        finally:
            await server.aclose()

    asyncio.run(play())


def test_a_server_that_does_not_start_is_a_user_error_with_its_stderr(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "broken.py").write_text("raise SystemExit('no licence')")
    with pytest.raises(UserError, match="its stderr ends with:\nno licence"):
        asyncio.run(McpServer([sys.executable, "broken.py"], base=str(tmp_path)).list_tools())
    with pytest.raises(UserError, match="No such file or directory"):
        asyncio.run(McpServer("/no/such/program").list_tools())


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "mcp":
            raise ImportError("No module named 'mcp'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'burnish\[mcp\]'"):
        McpServer("server")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give `command`"),
        ({"command": "x", "url": "http://h/mcp"}, "and not both"),
        ({"command": ""}, "`command` is empty"),
        ({"url": "h:80"}, "url must be like"),
        ({"command": "x", "session": "one"}, "shared or episode"),
        ({"command": "x", "sessions": 0}, "sessions must be 1 or more"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        McpServer(**options)
