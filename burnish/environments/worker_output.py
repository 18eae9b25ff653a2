"""What worker processes print: the last lines of each for error messages, and a log of bounded size for the run directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from burnish.run.supervisor.processes import STACKS_SIGNAL

OnOutput = Callable[[list[bytes]], None]
"""Takes complete lines of a process's output."""
NUM_OUTPUT_LINES = 20
MAX_LINE_CHARS = 500
MAX_LOGGED_LINES = 100_000
"""Lines of one process that are logged."""
MAX_LOG_BYTES = 16 << 20
OUTPUT_WAIT_S = 0.5
"""How long to wait for the last output of a process, or for the stacks it was asked for."""
OWN_FRAMES = (
    "/asyncio/",
    "/threading.py",
    "/selectors.py",
    "runpy>",
    "object_host.py",
    "worker_process.py",
    "hread 0x",
)
"""Parts of the lines in a worker's stacks that say nothing about user code."""


class WorkerOutput(asyncio.Protocol):
    """Reads what a process prints: passes complete lines on up to a limit, and keeps the last ones for error messages."""

    def __init__(self, on_output: OnOutput | None) -> None:
        self.lines: deque[str] = deque(maxlen=NUM_OUTPUT_LINES)
        self.ended = asyncio.get_running_loop().create_future()
        self._on_output = on_output
        self._part = b""
        self._num_passed_on = 0
        self._are_stacks = False

    def data_received(self, data: bytes) -> None:
        *complete, self._part = (self._part + data).split(b"\n")
        self._part = self._part[:MAX_LINE_CHARS]  # a line without end must not fill the runner's memory
        for line in complete:
            self._add(line)
        if self._on_output is not None and complete and self._num_passed_on < MAX_LOGGED_LINES:
            self._num_passed_on += len(complete)
            if self._num_passed_on >= MAX_LOGGED_LINES:
                complete = [f"more than {MAX_LOGGED_LINES} lines of this process; the rest is not logged".encode()]
            self._on_output([line[:MAX_LINE_CHARS] for line in complete])

    def connection_lost(self, error: Exception | None) -> None:
        if self._part:
            self._add(self._part)
            if self._on_output is not None:
                self._on_output([self._part])
        if not self.ended.done():
            self.ended.set_result(None)

    async def ask_for_stacks(self, pid: int) -> None:
        """Have a process print where its threads are, also if no Python code can run in it, and keep what concerns user code."""
        self._are_stacks = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
        await asyncio.sleep(OUTPUT_WAIT_S)
        self._are_stacks = False

    def _add(self, line: bytes) -> None:
        text = line[:MAX_LINE_CHARS].decode(errors="replace").rstrip()
        if self._are_stacks and (not text or any(part in text for part in OWN_FRAMES)):
            return
        self.lines.append(text)


class WorkerLog:
    """A file with the output and the failures of worker processes, each line behind the number of its process.

    A file that would pass `max_bytes` keeps the newer half of its lines. One process writes it.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._num_bytes: int | None = None
        """Size of the file; None before the first line, which a resumed run appends."""

    def write(self, number: int, lines: Sequence[bytes]) -> None:
        """Append lines of a process."""
        text = b"".join(b"%d| %s\n" % (number, line) for line in lines)[-self.max_bytes // 2 :]
        if self._num_bytes is None:
            self._num_bytes = self.path.stat().st_size if self.path.exists() else 0
        if self._num_bytes + len(text) > self.max_bytes:
            kept = self.path.read_bytes()[-self.max_bytes // 2 :]
            self.path.write_bytes(kept[kept.find(b"\n") + 1 :])
            self._num_bytes = self.path.stat().st_size
        with self.path.open("ab") as file:
            file.write(text)
        self._num_bytes += len(text)
