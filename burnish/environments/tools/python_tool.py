"""Python in the sandbox as a tool: stateless (`PythonTool`), or as a session that keeps its variables (`PythonSession`).

The code runs in burnish's sandbox, as the programs of the `code` reward do: without network, without the machine's files, with limits on
time, memory, processes and output. Only the standard library can be imported. The tools themselves only wait, so they run in the event loop:
each call is a few milliseconds of another process (bench/python_tool.py).
"""

from __future__ import annotations

import asyncio
import os
import re
import warnings
from dataclasses import replace
from typing import Any, ClassVar, Literal

from burnish.config.errors import UserError
from burnish.environments.base import RunsIn
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.values import WrongArguments, check_arguments, cut_middle, tool_schema
from burnish.sandbox.client import RunLost
from burnish.sandbox.limits import MIB, Limits
from burnish.sandbox.sessions import CellResult, Session, SessionSandbox

MIN_MEMORY_GIB = 0.125  # the interpreter with what it has loaded needs about this address space
FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL | re.IGNORECASE)
UNSAFE_WARNING = (
    "Python tool with sandbox=unsafe: programs written by the model run on this machine as you. They can read, change and send your "
    "files; only time, memory, processes and output are limited"
)
ENDS = {
    "time": "it did not end after {timeout_s:g} s",
    "cpu": "it used more than {timeout_s:g} s of CPU time",
    "memory": "it used more than {memory_gib:g} GiB of memory",
    "processes": "it started too many processes",
    "exited": "its process ended",
    "lost": "the sandbox broke while it ran",
}


RESTARTED = "(Python was started again, because an earlier call was cut off: variables, functions and imports before it are lost)"


class PythonTool(Tool):
    """Runs a program and returns what it printed, followed by the value of a last expression. Nothing stays for the next call."""

    runs_in: ClassVar[RunsIn] = "loop"

    def __init__(
        self,
        name: str = "python",
        timeout_s: float = 5.0,
        memory_gib: float = 0.5,
        max_output_chars: int = 4000,
        errors: Literal["traceback", "last_line"] = "traceback",
        error_reward: float | None = None,
        max_running: int | None = None,
        max_sessions: int = 4096,
        sandbox: Literal["namespaces", "unsafe"] = "namespaces",
    ) -> None:
        """Options:

        - `timeout_s`: the longest a program may run. A program that waits for its turn is not running.
        - `memory_gib`: the memory of a program with all processes it starts.
        - `max_output_chars`: of a longer output, the middle is left out.
        - `errors`: show the traceback of an exception, or its last line only (ToRL).
        - `error_reward`: the reward of a call whose code fails, such as ToRL's -0.5; none by default.
        - `max_running`: how many programs run at the same time; by default as many as there are cores.
        - `max_sessions`: how many sessions may be open at the same time.
        - `sandbox`: `unsafe` runs programs as you, where the system allows no sandbox.
        """
        for key, value in (
            ("timeout_s", timeout_s),
            ("max_output_chars", max_output_chars),
            ("max_sessions", max_sessions),
            ("max_running", 1 if max_running is None else max_running),
        ):
            if not value > 0:
                raise UserError(f"Python tool: {key} must be above 0, not {value}")
        if memory_gib < MIN_MEMORY_GIB:
            raise UserError(f"Python tool: memory_gib must be {MIN_MEMORY_GIB} or more, not {memory_gib}")
        for key, choice, known in (
            ("errors", errors, ("traceback", "last_line")),
            ("sandbox", sandbox, ("namespaces", "unsafe")),
        ):
            if choice not in known:
                raise UserError(f"Python tool: {key} must be one of {', '.join(known)}, not {choice!r}")
        if sandbox == "unsafe":
            warnings.warn(UNSAFE_WARNING, stacklevel=2)
        self._timeout_s, self._memory_gib = timeout_s, memory_gib
        self._max_output_chars, self._error_reward = max_output_chars, error_reward
        self._has_traceback = errors == "traceback"
        self.is_isolated = sandbox == "namespaces"
        self._max_running = max_running or os.cpu_count() or 1
        self._limits = Limits(
            memory_bytes=int(memory_gib * 1024) * MIB, scratch_bytes=16 * MIB, max_sessions=max_sessions
        )
        code = {"type": "string", "description": "The Python code."}
        self.schema = tool_schema(name, self._description(), {"code": code}, ["code"])

    def _description(self) -> str:
        return (
            "Run Python code and return what it prints and the value of a last expression. Each call starts anew. "
            "Only the standard library is there, and no network."
        )

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Run the code. An error of the code is part of the text; an error of the sandbox raises."""
        try:
            code = check_arguments(self.schema, arguments)["code"]
        except WrongArguments as error:
            return ToolResult(f"Error: {error}", self._error_reward, {"tool/wrong_arguments": 1.0})
        fenced = FENCED.fullmatch(code)
        return self._result(await self._run(fenced[1] if fenced else code))

    async def _run(self, code: str) -> CellResult:
        session = self._new_session()
        try:
            return await self._run_cell(session, code)
        except RunLost:  # run it once more; only a program that breaks the sandbox does so twice
            session = self._new_session()
            return await self._run_cell_or_lose(session, code)
        finally:
            session.close()

    def _new_session(self) -> Session:
        return _shared_sandbox(self._limits, self.is_isolated, self._max_running).new_session()

    async def _run_cell(self, session: Session, code: str) -> CellResult:
        # A character has up to four bytes; the rest is cut below.
        return await session.run(code, self._timeout_s, self._has_traceback, 4 * self._max_output_chars)

    async def _run_cell_or_lose(self, session: Session, code: str) -> CellResult:
        try:
            return await self._run_cell(session, code)
        except RunLost:
            return CellResult("lost", None, "")

    def _result(self, cell: CellResult) -> ToolResult | str:
        text = cut_middle(cell.output.rstrip("\n"), self._max_output_chars)
        if cell.ended == "done" and cell.raised is None:
            return text or "(no output)"
        if cell.ended == "interrupted":
            return self._failed(f"{text}\nError: the code was stopped after {self._timeout_s:g} s", "code_stopped")
        if cell.ended == "done":
            return self._failed(text, "code_raised")
        reason = ENDS[cell.ended].format(timeout_s=self._timeout_s, memory_gib=self._memory_gib)
        return self._failed(f"{text}\nError: the code was ended: {reason}{self._after_end()}", "code_ended")

    def _failed(self, text: str, kind: str) -> ToolResult:
        return ToolResult(text.lstrip("\n"), self._error_reward, {f"tool/{kind}": 1.0})

    def _after_end(self) -> str:
        return ""


class PythonSession(PythonTool):
    """Runs the cells of one episode in one process, as a notebook does: variables, functions and imports stay.

    The process starts with the first call and is killed at the end of the episode. Between two calls it is stopped. Code that passes a
    limit ends the process; the next call starts another, and the model is told that its variables are lost. So it is after a call that was
    cut off from outside, at `environment.deadline_s`: the next result says it.
    """

    is_stateful: ClassVar[bool] = True
    _session: Session | None = None
    _calls: asyncio.Lock | None = None
    _has_lost_variables: bool = False
    """Whether the process was ended without a word to the model."""

    def _description(self) -> str:
        return (
            "Run Python code and return what it prints and the value of a last expression. Variables, functions and imports "
            "stay for later calls. Only the standard library is there, and no network."
        )

    async def _run(self, code: str) -> CellResult:
        self._calls = self._calls or asyncio.Lock()
        async with self._calls:  # parallel calls of one answer run in their order
            if self._session is None or self._session.is_closed:
                self._session = self._new_session()
            try:
                cell = await self._run_cell_or_lose(self._session, code)
            except BaseException:
                self._has_lost_variables |= self._session.is_closed
                raise
            if self._has_lost_variables:
                self._has_lost_variables = False
                cell = replace(cell, output=f"{RESTARTED}\n{cell.output}")
            return cell

    def _after_end(self) -> str:
        return ". All variables are lost"

    async def close(self) -> None:
        """Kill the process of the session."""
        if self._session is not None:
            self._session.close()
            self._session = None


# --- the sandbox that all tools of a process share -------------------------------------------------------------------

SandboxKey = tuple[asyncio.AbstractEventLoop, Limits, bool, int]
_sandboxes: dict[SandboxKey, SessionSandbox] = {}


def _shared_sandbox(limits: Limits, is_isolated: bool, max_running: int) -> SessionSandbox:
    """The sandbox of this event loop for these limits. Sandboxes of loops that have ended are closed."""
    for key in [key for key in _sandboxes if key[0].is_closed()]:
        _sandboxes.pop(key).close()
    key = (asyncio.get_running_loop(), limits, is_isolated, max_running)
    if key not in _sandboxes:
        _sandboxes[key] = SessionSandbox(limits, is_isolated, max_running)
    return _sandboxes[key]


def close_sandboxes() -> None:
    """Kill all sandboxes of this process. They also end with the thread that started them."""
    while _sandboxes:
        _sandboxes.popitem()[1].close()
