"""`AgentCommand`: any program that calls the model through `OPENAI_BASE_URL`, started anew for each episode.

The program gets the row as one line of JSON on standard input and in the file `row.json` of its working directory, which is new and its own.
Its environment has `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`, the same for Anthropic, and of the user's variables only those that
are listed. It ends with status 0. The last line of its standard output, if it is JSON, is the result: a reward, or a dictionary with
`reward`, `success`, `metrics` or `answer`. Without it, the configured reward scores the last answer.

The program is in a process group of its own, which dies with the run. Whatever the program started is killed at the end of the episode, also if
it has left the group: its environment still has the episode's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from burnish.config.errors import UserError
from burnish.environments.agent_function import MODEL_NAME, read_result, row_columns
from burnish.environments.base import AgentProgram, AgentTask, End, EpisodeFailed
from burnish.rewards import worker_limits
from burnish.run.supervisor.processes import kill_all_with_variable

PASSED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "LD_LIBRARY_PATH")
"""Variables of the user that every program gets."""
OWN_PYTHON = ("python", "python3")
"""Names of the interpreter that runs burnish, so that a script finds the packages that are installed beside it."""
MAX_FILE_GIB = 1.0
KEY_VARIABLE = "OPENAI_API_KEY"
NUM_LINES = 20
"""Lines of standard error in a message about a failed program."""
MAX_LINE_CHARS = 500
KILL_TIMEOUT_S = 10.0


class AgentCommand(AgentProgram):
    """Runs a command for one episode."""

    def __init__(
        self,
        command: Sequence[str],
        base: str | None = None,
        memory_gib: float = 4.0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Relative paths in the command are looked up in `base`. `variables` are added to the program's environment."""
        self.command = [_resolved(part, base) for part in command]
        if self.command[0] in OWN_PYTHON:
            self.command[0] = sys.executable  # also where no virtual environment is active
        if shutil.which(self.command[0]) is None:
            raise UserError(f"environment.command: there is no program {command[0]!r}")
        self._memory_gib, self._variables = memory_gib, dict(variables or {})
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        self._is_interrupted = False

    async def play(self, task: AgentTask) -> End:
        """Run the program to its end."""
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
            row = json.dumps(row_columns(task.episode), ensure_ascii=False, default=str)
            Path(folder, "row.json").write_text(row, encoding="utf-8")
            try:
                return await self._run(task, row, folder)
            finally:
                await self._kill()
                await asyncio.to_thread(kill_all_with_variable, f"{KEY_VARIABLE}={task.api_key}")

    async def interrupt(self) -> None:
        """Kill the program: `play` then ends with a failure."""
        self._is_interrupted = True
        await self._kill()

    async def _run(self, task: AgentTask, row: str, folder: str) -> End:
        their_lifeline, self._lifeline = os.pipe()
        # A file of its own runs before the command: it sets the limits, and ties the process group to this process.
        limited = [sys.executable, "-I", "-S", worker_limits.__file__]
        limits = [str(their_lifeline), str(self._memory_gib), str(MAX_FILE_GIB)]
        with tempfile.TemporaryFile(dir=folder) as output, tempfile.TemporaryFile(dir=folder) as errors:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *limited,
                    *limits,
                    *self.command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=errors,
                    cwd=folder,
                    env=self._environment(task, folder),
                    pass_fds=[their_lifeline],
                    start_new_session=True,
                )
            finally:
                os.close(their_lifeline)
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program that does not read its input
                self._process.stdin.write(row.encode() + b"\n")
                await self._process.stdin.drain()
            self._process.stdin.close()
            status = await self._process.wait()
            if status != 0 or self._is_interrupted:
                raise EpisodeFailed("agent_died", f"program {_exit_text(status)}", _tail(errors, NUM_LINES))
            return self._result(output, errors)

    def _environment(self, task: AgentTask, folder: str) -> dict[str, str]:
        passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        anthropic_url = task.base_url.removesuffix("/v1")  # its client adds /v1 itself
        return passed | {
            "HOME": folder,
            "TMPDIR": folder,
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_MODEL": MODEL_NAME,
            "ANTHROPIC_BASE_URL": anthropic_url,
            "ANTHROPIC_API_KEY": task.api_key,
            "ANTHROPIC_MODEL": MODEL_NAME,
            "NO_PROXY": "*",
            **self._variables,
            KEY_VARIABLE: task.api_key,  # by which its processes are found
        }

    def _result(self, output: IO[bytes], errors: IO[bytes]) -> End:
        """Read the last line of the output."""
        last = _tail(output, 1).strip()
        try:
            result = json.loads(last) if last else None
        except ValueError:
            return End(text=last)  # words of the program, not a result
        if isinstance(result, list | str):
            return End(text=last)
        try:
            return read_result(result, "the program printed")
        except TypeError as error:
            raise EpisodeFailed("bad_reply", str(error), _tail(errors, NUM_LINES)) from error

    async def _kill(self) -> None:
        """Kill the process group of the program."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # stuck in the kernel
                await asyncio.wait_for(process.wait(), KILL_TIMEOUT_S)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def _resolved(part: str, base: str | None) -> str:
    """Return a part of a command, as an absolute path if it is a file of the recipe's folder: the program runs in a folder of its own."""
    if base is None or part.startswith("-") or Path(part).is_absolute():
        return part
    for folder in (Path(base), Path.cwd()):
        if (found := folder / part).is_file():
            return str(found.resolve())
    return part


def _exit_text(status: int) -> str:
    return f"exited with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"


def _tail(file: IO[bytes], num_lines: int) -> str:
    """Return the last lines of a file, each cut to a bounded length."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - num_lines * 4 * MAX_LINE_CHARS - (1 << 16)))
    lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return "\n".join(line if num_lines == 1 else line[:MAX_LINE_CHARS] for line in lines[-num_lines:])
