"""The driver's heartbeat file, the age of the process, and a clean stop on Ctrl-C.

The heartbeat is a small file in the run directory with the driver's current step and phase. It is rewritten at every
progress: a step, a phase, a completion. The supervisor (`supervisor.py`) ends a driver whose file has not changed for too
long, and names the phase in which the driver hung or died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TextIO

from burnish.config.errors import UserError
from burnish.run.display import Display

HEARTBEAT_FILE = "heartbeat.json"
RECORD_BYTES = 512
"""Fixed size of a record, so that one write replaces it."""
MIN_INTERVAL_S = 0.25
"""Shortest time between two records that differ only in a count."""
DROP_DIGITS = str.maketrans("", "", "0123456789")
IMPORT_TIME = time.monotonic()
PROC_STAT = Path("/proc/self/stat")
INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPT_POLL_S = 0.2
SAME_SIGNAL_S = 0.5
"""Signals within this time count as one. Batch systems signal every process of a job, and the supervisor forwards its own."""


@dataclass(frozen=True)
class HeartbeatRecord:
    """The driver's step and phase, and the number of records it has written."""

    step: int
    phase: str
    count: int

    def __str__(self) -> str:
        return ", ".join(([f"step {self.step}"] if self.step else []) + ([f"{self.phase!r}"] if self.phase else []))


def read_heartbeat(path: Path, pid: int) -> HeartbeatRecord | None:
    """Return the last record of a driver; None if it has written none or is writing one."""
    try:
        record = json.loads(path.read_bytes())
        return HeartbeatRecord(record["step"], record["phase"], record["count"]) if record["pid"] == pid else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


class Heartbeat:
    """Writes the heartbeat of one driver."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._count, self._written, self._kind = 0, -MIN_INTERVAL_S, ""
        self.beat(0, "starting")

    def beat(self, step: int, phase: str) -> None:
        """Report progress. The call is cheap: calls in quick succession that differ only in a count write one record."""
        now, kind = self._clock(), f"{step}|{phase.translate(DROP_DIGITS)}"
        if kind == self._kind and now - self._written < MIN_INTERVAL_S:
            return
        self._count, self._written, self._kind = self._count + 1, now, kind
        record = {"step": step, "phase": phase[:60], "count": self._count, "pid": os.getpid(), "time": time.time()}
        try:
            os.pwrite(self._file, json.dumps(record).ljust(RECORD_BYTES - 1).encode()[: RECORD_BYTES - 1] + b"\n", 0)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class HeartbeatDisplay(Display):
    """A display that also reports its steps and phases to the heartbeat."""

    def __init__(self, log: Path, heartbeat: Heartbeat, stream: TextIO | None = None) -> None:
        super().__init__(log, stream)
        self._heartbeat, self._at, self._last = heartbeat, 0, 0

    def start(self, title: str, total_steps: int, first_step: int = 0) -> None:
        self._at, self._last = first_step, total_steps
        self._heartbeat.beat(first_step + 1, "")
        super().start(title, total_steps, first_step)

    def step(self, step: int, values: dict[str, Any]) -> None:
        self._at = step
        self._heartbeat.beat(min(step + 1, self._last), "" if step < self._last else "all steps are done")
        super().step(step, values)

    def phase(self, text: str, of: str | None = None) -> None:
        self._heartbeat.beat(self._at + 1, text if of is None else f"{of}: {text}")
        super().phase(text, of)


def process_seconds() -> float:
    """Return the seconds since this process started, imports included. Without /proc, since this module was imported."""
    if not PROC_STAT.exists():
        return time.monotonic() - IMPORT_TIME
    after_name = PROC_STAT.read_text().rpartition(")")[2].split()  # the process name may contain spaces and brackets
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field: clock ticks since the machine booted
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class StopOnInterrupt:
    """On the first SIGINT or SIGTERM, the step finishes and is saved. The second stops at once; the journal keeps finished work.

    `end_early` may cut short what a step waits for. From the first signal to the end of the block, another thread calls it
    repeatedly. The signal handler does not call it, because it must not take a lock that the main thread may hold.
    """

    num_heard: ClassVar[int] = 0
    """Number of signals to this process so far. A signal in the last step still reaches what runs after the block."""

    def __init__(
        self,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        end_early: Callable[[], None] | None = None,
    ) -> None:
        self.note, self.requested, self._end_early = note, False, end_early
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None
        self.previous: dict[int, Any] = {}
        self._clock, self._heard = clock, 0.0

    def __enter__(self) -> StopOnInterrupt:
        # Only the main thread can install handlers. In another thread, the main thread's code handles the signals.
        for number in INTERRUPT_SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self.previous[number] = signal.signal(number, self._handle)
        if self._end_early is not None:
            self._watcher = threading.Thread(target=self._watch, name="stop on interrupt", daemon=True)
            self._watcher.start()
        return self

    def _watch(self) -> None:
        assert self._end_early is not None
        while not self._is_over.wait(INTERRUPT_POLL_S):
            if self.requested:
                self._end_early()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, before = self._clock(), self._heard
        self._heard = now
        StopOnInterrupt.num_heard += 1
        if self.requested:
            if now - before < SAME_SIGNAL_S:
                return
            raise KeyboardInterrupt
        self.requested = True
        # If the signal arrives in the middle of a line of output, Python raises a RuntimeError for the nested write.
        # That must not end the run; its last line says that it stopped.
        with contextlib.suppress(RuntimeError):
            when = "after this step" if self._end_early is None else "after this step, or at once while it samples"
            self.note(f"stopping {when}; press Ctrl-C again to stop now")

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._watcher is not None:
            self._watcher.join()
        for number, handler in self.previous.items():
            signal.signal(number, handler)
