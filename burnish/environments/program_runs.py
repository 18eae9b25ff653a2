"""Runs programs of self-made tasks in the sandbox: `ProgramRuns.outputs` calls their function `f` with literals and returns its results.

A program runs in a process of its own, without network and without the machine's files, within limits of time, memory and output. Results
come back as the `repr` of values, and nothing that is to be compared with them is in the process: a program that forges its output can only
write a result that it has worked out. Every call of `outputs` is an independent run.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from burnish.data.tasks.code_tasks import NotALiteral, arguments, literal
from burnish.environments.tools.python_tool import PythonTool

HARNESS = """
def _run():
    import ast, contextlib, io, json
    program, calls, shift = json.loads({payload!r})
    padding = [(object(), [], {{}}, set(), str(k + 1000.5), lambda: k) for k in range(shift)]
    space = {{"__name__": "task"}}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(program, "task", "exec"), space)
        found = [repr(space["f"](*ast.literal_eval(call))) for call in calls]
    return json.dumps(found)
print(_run())
"""
MAX_ESCAPED = 6
"""A character of a value has up to this many characters in JSON."""
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
ENDED = {
    "interrupted": "out of time",
    "time": "out of time",
    "cpu": "out of time",
    "memory": "out of memory",
    "processes": "too many processes",
    "exited": "it ended its process",
    "lost": "the sandbox broke",
}


class RunFailed(Exception):
    """A program did not return literals for its inputs. The text says why."""


class ProgramRuns(PythonTool):
    """Runs programs with limits. All objects of one event loop with the same limits share a sandbox."""

    def __init__(
        self,
        timeout_s: float,
        memory_gib: float,
        max_value_chars: int,
        max_running: int | None,
        sandbox: Literal["namespaces", "unsafe"],
    ) -> None:
        super().__init__(
            timeout_s=timeout_s,
            memory_gib=memory_gib,
            errors="last_line",
            max_running=max_running,
            sandbox=sandbox,
        )
        self.max_value_chars = max_value_chars

    async def outputs(self, program: str, inputs: tuple[str, ...], shift: int = 0) -> tuple[str, ...]:
        """Return the result of each call as a literal. Raises `RunFailed`; an error of the sandbox itself is another exception.

        Processes of the sandbox are forks, with the same addresses in memory. Another `shift` moves objects to other addresses, so that two
        runs of a program that depends on `id` differ.
        """
        for text in inputs:
            if len(text) > self.max_value_chars:
                raise RunFailed(f"an input has {len(text)} characters, more than {self.max_value_chars}")
            try:
                arguments(text)
            except NotALiteral as error:
                raise RunFailed(f"an input is no literal: {error}") from error
        calls = [f"({text.strip()},)" for text in inputs]
        self._max_output_chars = (MAX_ESCAPED * self.max_value_chars + 4) * len(inputs) + 16
        cell = await self._run(HARNESS.format(payload=json.dumps([program, calls, shift])))
        if cell.ended != "done" or cell.raised is not None:
            raise RunFailed(f"the program failed: {ENDED.get(cell.ended) or cell.raised}"[:300])
        return self._checked(cell.output, len(inputs))

    def _checked(self, printed: str, num: int) -> tuple[str, ...]:
        try:
            found = json.loads(printed.strip().rpartition("\n")[2])
        except (ValueError, RecursionError) as error:
            raise RunFailed("the program's output is cut off or spoilt") from error
        if not isinstance(found, list) or len(found) != num or not all(isinstance(text, str) for text in found):
            raise RunFailed("the program's output is spoilt")
        for text in found:
            if len(text) > self.max_value_chars:
                raise RunFailed(f"an output has {len(text)} characters, more than {self.max_value_chars}")
            try:
                value = literal(text)
            except NotALiteral as error:
                raise RunFailed("an output is no literal") from error
            if ADDRESS.search(text):
                raise RunFailed("an output has an address in memory, which differs from run to run")
            if value is None:
                raise RunFailed("the program returns nothing")
        return tuple(found)
