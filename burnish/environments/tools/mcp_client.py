"""Tools of MCP servers, over stdio or streamable HTTP (extra `[mcp]`, package `mcp`, versions 1 and 2).

    server = McpServer(command=["python", "calc_server.py"])
    schemas = await server.list_tools()
    tools = server.make_tools()          # one Tool for each

A stdio server is started with the user's command line and is never imported: many servers need an interpreter of their own. What it writes to
stderr is shown when it fails. A session of the protocol is one state of the server. `session: shared` is for servers without state: all
episodes share a pool of `sessions` sessions. `session: episode` gives each episode a session of its own, which all its tools share.

An error that a tool reports is a text that the model reads. A server that dies is restarted once; then the call raises `McpServerDied`. The
state of an episode's own session cannot be restored, so its death raises at once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, ClassVar, Literal
from weakref import WeakValueDictionary

from burnish.config.errors import UserError, is_server_url, unknown_name_error
from burnish.config.extras import install_hint
from burnish.environments.base import Episode, RunsIn
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.values import WrongArguments, check_arguments, error_result, result_text

CONNECTION_CLOSED = -32000
"""The error code with which the package reports a lost connection."""
STDERR_LINES, STDERR_BYTES = 20, 8000
CLOSE_S = 10.0


class McpServerDied(Exception):
    """The server, or the connection to it, was lost. The message shows the end of its stderr."""


def import_mcp() -> Any:
    """The package `mcp`; UserError that names the extra if it is missing."""
    try:
        import mcp
    except ImportError as error:
        raise UserError(f"MCP tools need the package mcp: {install_hint('mcp')} ({error})") from error
    return mcp


class McpServer:
    """A server with the sessions that are open to it. All calls are made in one event loop."""

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        url: str | None = None,
        base: str | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        session: Literal["shared", "episode"] = "shared",
        sessions: int = 4,
        tools: Sequence[str] | None = None,
        prefix: str = "",
        timeout_s: float = 30.0,
        start_timeout_s: float = 30.0,
    ) -> None:
        """Options:

        - `command`: the command line of a stdio server, started in `base`; or `url`: the address of an HTTP server.
        - `env`: environment variables of a stdio server, besides PATH, HOME and the like. `headers`: of requests to an HTTP server.
        - `session`: `shared` by all episodes, or one an `episode`.
        - `sessions`: the size of the pool of shared sessions. A stdio server runs once for each.
        - `tools`: the names of the tools to offer; all by default. `prefix` is put before each name.
        - `timeout_s`, `start_timeout_s`: the longest a call and the start of a session may take.
        """
        if (command is None) == (url is None):
            raise UserError("MCP server: give `command` (stdio) or `url` (HTTP), and not both")
        self._command = shlex.split(command) if isinstance(command, str) else list(command or [])
        if command is not None and not self._command:
            raise UserError("MCP server: `command` is empty")
        if url is not None and not is_server_url(url):
            raise UserError(f"MCP server: url must be like http://127.0.0.1:8000/mcp, not {url!r}")
        if session not in ("shared", "episode"):
            raise UserError(f"MCP server: session must be shared or episode, not {session!r}")
        if sessions < 1 or not timeout_s > 0 or not start_timeout_s > 0:
            raise UserError("MCP server: sessions must be 1 or more, timeout_s and start_timeout_s above 0")
        import_mcp()
        self.url, self.base, self.env, self.headers = url, base, dict(env or {}), dict(headers or {})
        self.is_shared, self.timeout_s, self.start_timeout_s = session == "shared", timeout_s, start_timeout_s
        self._max_sessions, self._wanted, self._prefix = sessions, tools, prefix
        self._pool: list[_Connection] = []
        self._episodes: set[_EpisodeSession] = set()
        self._by_episode: WeakValueDictionary[int, _EpisodeSession] = WeakValueDictionary()
        self._schemas: dict[str, dict[str, Any]] | None = None

    @property
    def command(self) -> list[str]:
        return self._command

    @property
    def where(self) -> str:
        """The server, for messages."""
        return f"MCP server {self.url or shlex.join(self._command)!r}"

    async def list_tools(self) -> list[dict[str, Any]]:
        """The schemas of the server's tools; UserError if it does not start. It must come before `make_tools`."""
        if self._schemas is None:
            connection = self._least_busy() if self.is_shared else _Connection(self)
            is_kept = False
            try:
                session = await connection.open()
                async with asyncio.timeout(self.start_timeout_s):
                    listed = await _list_all(session)
                is_kept = self.is_shared
            except McpServerDied as error:
                raise UserError(str(error)) from error
            except TimeoutError as error:
                raise UserError(f"{self.where}: it did not list its tools in {self.start_timeout_s:g} s") from error
            finally:
                if not is_kept:
                    await connection.close()
            names = [tool.name for tool in listed]
            for name in self._wanted or ():
                if name not in names:
                    raise unknown_name_error(f"tool of the {self.where}", name, names)
            wanted = [tool for tool in listed if self._wanted is None or tool.name in self._wanted]
            self._schemas = {tool.name: _schema(tool, self._prefix) for tool in wanted}
        return list(self._schemas.values())

    def make_tools(self, episode: Episode | None = None) -> list[McpTool]:
        """New tool objects, for all episodes if the session is shared. Otherwise they are for one episode, and share its session.

        Objects of several calls with the same `episode` share its session too.
        """
        assert self._schemas is not None, "`list_tools` comes before `make_tools`"
        if self.is_shared:
            return [McpTool(self, name, schema) for name, schema in self._schemas.items()]
        own = self._by_episode.get(id(episode)) if episode is not None else None
        if own is None:
            own = _EpisodeSession(self, episode)
            if episode is not None:
                self._by_episode[id(episode)] = own  # unique as long as the session refers to the episode
        return [McpSessionTool(self, name, schema, own) for name, schema in self._schemas.items()]

    async def call_shared(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool in a session of the pool. A session that is lost is replaced once."""
        try:
            return await self._least_busy().call(name, arguments)
        except McpServerDied:
            return await self._least_busy().call(name, arguments)

    def _least_busy(self) -> _Connection:
        self._pool = [connection for connection in self._pool if not connection.is_lost]
        free = min(self._pool, key=lambda connection: connection.num_calls, default=None)
        if free is None or (free.num_calls and len(self._pool) < self._max_sessions):
            free = _Connection(self)
            self._pool.append(free)
        return free

    def enter_episode(self, own: _EpisodeSession) -> None:
        """A tool begins an episode. The first call of any of its tools opens the session."""
        self._episodes.add(own)
        own.num_tools += 1

    async def call_in_episode(self, own: _EpisodeSession, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool in the session of an episode. A session that is lost is replaced only if it has no state yet."""
        try:
            result = await own.connection.call(name, arguments)
        except McpServerDied:
            if own.has_state:
                raise
            await own.reset(self)
            result = await own.connection.call(name, arguments)
        own.has_state = True
        return result

    async def leave_episode(self, own: _EpisodeSession) -> None:
        """A tool ends an episode. The last one closes the session."""
        own.num_tools -= 1
        if own.num_tools == 0:
            self._episodes.discard(own)
            await own.reset(self)

    async def aclose(self) -> None:
        """Close all sessions, and with them the processes of a stdio server."""
        open_ones = [*self._pool, *(own.connection for own in self._episodes)]
        self._pool, self._episodes = [], set()
        await asyncio.gather(*(connection.close() for connection in open_ones))


class McpTool(Tool):
    """A tool of a server without state."""

    runs_in: ClassVar[RunsIn] = "loop"

    def __init__(self, server: McpServer, tool: str, schema: dict[str, Any]) -> None:
        self.server, self.tool, self.schema = server, tool, schema

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Call the tool. What it reports as an error becomes text; a lost server raises."""
        try:
            checked = check_arguments(self.schema, arguments)
        except WrongArguments as error:
            return error_result(str(error), "wrong_arguments")
        result = await self._call(checked)
        if isinstance(result, str):  # the protocol's own error
            return error_result(result)
        text = result_text(_content_text(result))
        if _field(result, "is_error", "isError"):
            return error_result(text)
        images = tuple({"bytes": base64.b64decode(part.data)} for part in result.content if part.type == "image")
        return ToolResult(text, images=images) if images else text

    async def _call(self, arguments: dict[str, Any]) -> Any:
        return await self.server.call_shared(self.tool, arguments)


class McpSessionTool(McpTool):
    """A tool of a server with state. All tools of an episode share the episode's session."""

    is_stateful: ClassVar[bool] = True

    def __init__(self, server: McpServer, tool: str, schema: dict[str, Any], own: _EpisodeSession) -> None:
        super().__init__(server, tool, schema)
        self._own, self._is_started = own, False

    async def start(self, episode: Episode, arguments: Mapping[str, Any]) -> None:
        self.server.enter_episode(self._own)
        self._is_started = True

    async def _call(self, arguments: dict[str, Any]) -> Any:
        assert self._is_started, "`start` comes before the first call"
        return await self.server.call_in_episode(self._own, self.tool, arguments)

    async def close(self) -> None:
        if self._is_started:
            self._is_started = False
            await self.server.leave_episode(self._own)


# --- sessions --------------------------------------------------------------------------------------------------------


class _EpisodeSession:
    """The session of one episode, shared by its tools."""

    def __init__(self, server: McpServer, episode: Episode | None = None) -> None:
        self.connection, self.num_tools, self.has_state = _Connection(server), 0, False
        self.episode = episode

    async def reset(self, server: McpServer) -> None:
        """Close the session. The next call opens another."""
        lost, self.connection, self.has_state = self.connection, _Connection(server), False
        await lost.close()


class _Connection:
    """One session. A task of its own enters and leaves the package's contexts, which must happen in the same task."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._closing = asyncio.Event()
        self._stderr: IO[str] | None = None
        self._last_lines: list[str] | None = None  # of stderr, once the session has ended
        self.num_calls = 0
        self.is_lost = False

    async def open(self) -> Any:
        """The package's session; McpServerDied if it cannot be opened."""
        if self._task is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._ready))
        assert self._ready is not None
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            self.is_lost = True
            died = self._died(f"it did not start a session in {self._server.start_timeout_s:g} s")
            self._task.cancel()
            raise died from None

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a call, or the text of an error of the protocol. TimeoutError after `timeout_s`."""
        self.num_calls += 1
        try:
            session = await self.open()
            async with asyncio.timeout(self._server.timeout_s):
                return await session.call_tool(name, arguments)
        except TimeoutError:
            raise TimeoutError(f"{self._server.where}: {name} timed out after {self._server.timeout_s:g} s") from None
        except (McpServerDied, asyncio.CancelledError):
            raise
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            if code is None or code == CONNECTION_CLOSED:  # not an answer of the server
                self.is_lost = True
                raise self._died(f"{type(error).__name__}: {error}") from error
            return str(error)
        finally:
            self.num_calls -= 1
            if self.is_lost:
                self._closing.set()

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Open the session, and keep it open until `close`."""
        from mcp import ClientSession

        try:
            async with contextlib.AsyncExitStack() as stack:
                read, write, *_ = await stack.enter_async_context(self._transport())
                session = await stack.enter_async_context(ClientSession(read, write))
                await session.initialize()
                if not ready.done():
                    ready.set_result(session)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - whatever transport and server raise means that the session is lost
            if not ready.done():
                ready.set_exception(self._died(_first_error(error)))
                ready.exception()  # it counts as seen even if the caller has given up
        finally:
            self.is_lost = True
            if self._stderr is not None:
                self._last_lines = self._stderr_lines(self._stderr)
                self._stderr.close()
                self._stderr = None
            if not ready.done():
                ready.set_exception(self._died("the session was closed"))
                ready.exception()

    def _transport(self) -> Any:
        """The package's context of the connection."""
        server = self._server
        if server.url is None:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed at the end of `_hold`
            program, *arguments = server.command
            parameters = StdioServerParameters(
                command=program, args=arguments, env=server.env or None, cwd=server.base or None
            )
            return stdio_client(parameters, errlog=self._stderr)
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        client = create_mcp_http_client(headers=server.headers) if server.headers else None
        return streamable_http_client(server.url, http_client=client)

    def _died(self, problem: str) -> McpServerDied:
        """The error, with the end of the server's stderr."""
        words = f"{self._server.where}: {problem}"
        lines = self._last_lines if self._stderr is None else self._stderr_lines(self._stderr)
        if lines is not None:
            words += "\nits stderr ends with:\n" + "\n".join(lines) if lines else "; its stderr is empty"
        return McpServerDied(words)

    @staticmethod
    def _stderr_lines(file: IO[str]) -> list[str]:
        file.seek(max(0, file.seek(0, 2) - STDERR_BYTES))
        return file.read().splitlines()[-STDERR_LINES:]

    async def close(self) -> None:
        """Close the session. What does not end by itself is cancelled: a session that is not open yet, or a transport that hangs."""
        self.is_lost = True
        self._closing.set()
        if self._task is None:
            return
        if self._ready is not None and self._ready.done():
            await asyncio.wait([self._task], timeout=CLOSE_S)
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_S)


def _first_error(error: BaseException) -> str:
    """The first error inside a group, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


# --- fields of versions 1 and 2 --------------------------------------------------------------------------------------


def _field(value: Any, name: str, old_name: str) -> Any:
    """A field under its name in version 2 (snake case) or version 1 (camel case)."""
    return getattr(value, name) if hasattr(value, name) else getattr(value, old_name, None)


async def _list_all(session: Any) -> list[Any]:
    """All tools of a server, which may list them in pages."""
    from mcp import types

    tools: list[Any] = []
    cursor: str | None = None
    while True:
        params: Any = types.PaginatedRequestParams(cursor=cursor) if cursor else None
        page = await session.list_tools(params=params)
        tools += page.tools
        cursor = _field(page, "next_cursor", "nextCursor")
        if not cursor:
            return tools


def _schema(tool: Any, prefix: str) -> dict[str, Any]:
    parameters = dict(_field(tool, "input_schema", "inputSchema") or {"type": "object", "properties": {}})
    function = {"name": prefix + tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _content_text(result: Any) -> str:
    """The content of a result as text. Parts that are neither text nor images are named."""
    parts = [_part_text(part) for part in result.content if part.type != "image"]
    structured = _field(result, "structured_content", "structuredContent")
    if not parts and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(parts)


def _part_text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    resource = getattr(part, "resource", None)
    if resource is not None and hasattr(resource, "text"):
        return str(resource.text)
    if part.type == "resource_link":
        return f"[resource {part.uri}]"
    kind = _field(part, "mime_type", "mimeType") or ""
    return f"[{part.type} {kind}]".replace(" ]", "]")
