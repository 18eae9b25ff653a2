"""Handles of tools: the same interface for a tool in the runner's process and for one in a worker process.

A handle belongs to the run. `open` gives a session for one episode. A stateless tool serves all episodes with shared objects; a stateful
one gets an object of its own for each episode. Everything that goes wrong in a call is a `ToolFailed` with its kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from burnish.config.errors import UserError
from burnish.environments.base import Episode
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.values import tool_result
from burnish.environments.workers import CallFailed

MAX_TRACEBACK_CHARS = 8_000
MAX_SHARED_OBJECTS = 8
"""Objects of a stateless tool in worker processes, if the caller does not say how many workers there are."""
FailureKind = Literal["raised", "timed_out", "died", "bad_reply"]


class ToolFailed(Exception):
    """A call that gave no result: the tool raised, passed its deadline, lost its process, or returned what cannot be sent."""

    def __init__(self, kind: FailureKind, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message, self.traceback = message, traceback


class ToolSession(Protocol):
    """A tool in one episode."""

    async def call(self, arguments: dict[str, Any], deadline_s: float) -> Any:
        """Call the tool and return what it returns; raises `ToolFailed`."""

    async def end(self, deadline_s: float) -> Any:
        """The reward of a stateful tool for the whole episode, or None; raises `ToolFailed`."""

    async def close(self) -> None:
        """Free what the episode holds."""


class ToolHandle(Protocol):
    """A configured tool."""

    @property
    def schema(self) -> dict[str, Any]: ...

    @property
    def is_stateful(self) -> bool: ...

    async def open(self, episode: Episode, arguments: Mapping[str, Any], deadline_s: float) -> ToolSession:
        """Begin an episode with the row's arguments for this tool; raises `ToolFailed`."""


def tool_name(handle: ToolHandle) -> str:
    """The name under which the model calls a tool."""
    return str(handle.schema["function"]["name"])


# --- in the runner's process --------------------------------------------------------------------------------------------


async def within(work: Awaitable[Any], deadline_s: float) -> Any:
    """Await built-in code with a deadline. What it raises becomes a `ToolFailed`; a `UserError` passes and ends the run."""
    try:
        async with asyncio.timeout(deadline_s) as limit:
            return await work
    except UserError:
        raise
    except Exception as error:  # a tool may raise anything; the failure is returned with its traceback
        if limit.expired():
            raise ToolFailed("timed_out", f"timed out after {deadline_s:g} s") from error
        shown = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
        raise ToolFailed("raised", f"{type(error).__name__}: {error}", shown) from error


class LocalSession:
    """A tool object of this process in one episode."""

    def __init__(self, tool: Tool, is_own: bool) -> None:
        self.tool, self.is_own = tool, is_own

    async def call(self, arguments: dict[str, Any], deadline_s: float) -> Any:
        return await within(self.tool.call(arguments), deadline_s)

    async def end(self, deadline_s: float) -> Any:
        return await within(self.tool.end(), deadline_s) if self.is_own else None

    async def close(self) -> None:
        if self.is_own:
            await self.tool.close()


class LocalTool:
    """A tool that runs in the event loop: built-in code with `runs_in` runner or loop."""

    def __init__(self, make: Callable[[], Tool], make_for: Callable[[Episode], Tool] | None = None) -> None:
        """`make_for` makes the object of an episode, for a stateful tool that shares something with others of the episode."""
        self._make_for = make_for or (lambda episode: make())
        self._shared = make()
        self.schema, self.is_stateful = self._shared.schema, self._shared.is_stateful

    async def open(self, episode: Episode, arguments: Mapping[str, Any], deadline_s: float) -> ToolSession:
        if not self.is_stateful:
            return LocalSession(self._shared, is_own=False)
        session = LocalSession(self._make_for(episode), is_own=True)
        try:
            await within(session.tool.start(episode, arguments), deadline_s)
        except BaseException:
            await session.close()
            raise
        return session


# --- in worker processes ------------------------------------------------------------------------------------------------


class Remote(Protocol):
    """The part of `workers.RemoteObject` that is used here."""

    async def call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any: ...

    async def close(self) -> None: ...


OpenRemote = Callable[[], Awaitable[Remote]]
"""Opens another object of a tool, such as `lambda: workers.open(spec)`."""


@contextlib.contextmanager
def _as_tool_failure() -> Iterator[None]:
    try:
        yield
    except CallFailed as error:
        raise ToolFailed(error.kind, error.message, error.traceback) from error


@dataclass(eq=False)
class _Shared:
    """An object of a stateless tool."""

    remote: Remote
    num_calls: int = 0
    """Calls under way."""
    is_dropped: bool = False


class RemoteTool:
    """A tool whose objects live in worker processes.

    A stateless tool has up to `max_objects` objects, which the workers spread over their processes; a call goes to the least busy one. If
    its process dies, the call is made once more with another object. An object that passed a deadline gets no more calls.
    """

    def __init__(
        self,
        schema: dict[str, Any],
        open_remote: OpenRemote,
        is_stateful: bool = False,
        max_objects: int = MAX_SHARED_OBJECTS,
    ) -> None:
        self.schema, self.is_stateful = schema, is_stateful
        self._open_remote = open_remote
        self._max_objects = max_objects
        self._shared: list[_Shared] = []
        self._num_opening = 0
        self._has_opened = asyncio.Event()

    async def open(self, episode: Episode, arguments: Mapping[str, Any], deadline_s: float) -> ToolSession:
        if not self.is_stateful:
            return _SharedSession(self)
        with _as_tool_failure():
            remote = await self._open_remote()
            try:
                await remote.call("start", episode, dict(arguments), deadline_s=deadline_s)
            except BaseException:
                await _close_quietly(remote)
                raise
        return _OwnSession(remote)

    async def call_shared(self, arguments: dict[str, Any], deadline_s: float) -> Any:
        """Call an object of a stateless tool; once more with another one if its process dies."""
        try:
            return await self._call_once(arguments, deadline_s)
        except ToolFailed as error:
            if error.kind != "died":
                raise
        return await self._call_once(arguments, deadline_s)

    async def _call_once(self, arguments: dict[str, Any], deadline_s: float) -> Any:
        shared = await self._least_busy()
        shared.num_calls += 1
        try:
            with _as_tool_failure():
                return await shared.remote.call("call", arguments, deadline_s=deadline_s)
        except ToolFailed as error:
            if error.kind in ("died", "timed_out") and not shared.is_dropped:
                shared.is_dropped = True
                self._shared.remove(shared)
            raise
        finally:
            shared.num_calls -= 1
            if shared.is_dropped and shared.num_calls == 0:
                await _close_quietly(shared.remote)

    async def _least_busy(self) -> _Shared:
        while True:
            best = min(self._shared, key=lambda shared: shared.num_calls, default=None)
            is_full = len(self._shared) + self._num_opening >= self._max_objects
            if best is not None and (best.num_calls == 0 or is_full):
                return best
            if not is_full:
                break
            self._has_opened.clear()  # the first calls of many episodes come at once, and must not open an object each
            await self._has_opened.wait()
        self._num_opening += 1
        try:
            with _as_tool_failure():
                found = _Shared(await self._open_remote())
            self._shared.append(found)
        finally:
            self._num_opening -= 1
            self._has_opened.set()
        return found

    async def close(self) -> None:
        """Free the shared objects at the end of the run."""
        while self._shared:
            await _close_quietly(self._shared.pop().remote)


async def _close_quietly(remote: Remote) -> None:
    """Close an object whose state no longer matters: its failure to close concerns no episode."""
    with contextlib.suppress(CallFailed):
        await remote.close()


class _SharedSession:
    """A stateless tool in one episode. It holds nothing."""

    def __init__(self, tool: RemoteTool) -> None:
        self._tool = tool

    async def call(self, arguments: dict[str, Any], deadline_s: float) -> Any:
        return await self._tool.call_shared(arguments, deadline_s)

    async def end(self, deadline_s: float) -> Any:
        return None

    async def close(self) -> None:
        return None


class _OwnSession:
    """A stateful tool's object of one episode."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def call(self, arguments: dict[str, Any], deadline_s: float) -> Any:
        with _as_tool_failure():
            return await self._remote.call("call", arguments, deadline_s=deadline_s)

    async def end(self, deadline_s: float) -> Any:
        with _as_tool_failure():
            return await self._remote.call("end", deadline_s=deadline_s)

    async def close(self) -> None:
        with _as_tool_failure():
            await self._remote.close()


def as_result(value: Any) -> ToolResult:
    """What a tool returned, as a `ToolResult`. Anything that is neither text nor an image is turned into text."""
    if isinstance(value, ToolResult):
        return ToolResult(_as_text(value.text), value.reward, value.metrics, tuple(value.images))
    if isinstance(found := tool_result(value), ToolResult):
        return found
    return ToolResult(_as_text(value))


def _as_text(value: Any) -> str:
    text = bytes(value).decode(errors="replace") if isinstance(value, bytes | bytearray | memoryview) else str(value)
    return text.encode(errors="replace").decode()  # half of a surrogate pair cannot be tokenised
