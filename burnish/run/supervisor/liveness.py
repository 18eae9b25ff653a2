"""Signs of life: a small file in the run directory that says in which step and phase the driver is.

It is rewritten whenever something moves: a step, a phase, a completion. The supervisor (`supervise.py`) ends a driver whose
file has not changed for too long, and names the phase in which that happened, or in which the driver died.
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
"""Bytes of the record, whatever it says: it is written over in one piece."""
MIN_INTERVAL_S = 0.25
"""Between two records that differ in nothing but a count."""
DROP_DIGITS = str.maketrans("", "", "0123456789")


@dataclass(frozen=True)
class HeartbeatRecord:
    """Where the driver was, and the how many-th time it said so."""

    step: int
    phase: str
    count: int

    def __str__(self) -> str:
        return ", ".join(([f"step {self.step}"] if self.step else []) + ([f"{self.phase!r}"] if self.phase else []))


def read_heartbeat(path: Path, pid: int) -> HeartbeatRecord | None:
    """The last record of a driver; None where it has written none, or is just writing it."""
    try:
        record = json.loads(path.read_bytes())
        return HeartbeatRecord(record["step"], record["phase"], record["count"]) if record["pid"] == pid else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


class Heartbeat:
    """Writes the records of one driver."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._count, self._written, self._kind = 0, -MIN_INTERVAL_S, ""
        self.beat(0, "starting")

    def beat(self, step: int, phase: str) -> None:
        """Something moved. Cheap: of many calls in a moment that differ in a count alone, one is written."""
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
        """Write no more."""
        os.close(self._file)


class HeartbeatDisplay(Display):
    """A display that tells the heartbeat whatever it is told."""

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


# --- How long this process has been alive, from the moment it was started: imports and start-up are a user's time too.

IMPORT_TIME = time.monotonic()
PROC_STAT = Path("/proc/self/stat")


def process_seconds() -> float:
    """Seconds since this process was started; where the system does not say (no /proc), since this module was imported."""
    if not PROC_STAT.exists():
        return time.monotonic() - IMPORT_TIME
    after_name = PROC_STAT.read_text().rpartition(")")[2].split()  # a process may have spaces and brackets in its name
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field: clock ticks after the machine started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


# --- Ctrl-C, and the SIGTERM of a batch system, that lose nothing.

INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPT_POLL_S = 0.2
SAME_SIGNAL_S = 0.5
"""Signals that follow each other faster are one: batch systems signal every process of a job, and the supervisor passes its own on."""


class StopOnInterrupt:
    """The first signal lets the step finish and be saved; the second stops at once (the journal keeps what is done).

    `end_early` is called from another thread, again and again from the first signal to the end of the block: it may cut short what
    a step waits for. It is not called by the signal handler, which must not take a lock that the main thread may hold.
    """

    num_heard: ClassVar[int] = 0
    """Signals of this process so far: one that comes in the last step changes nothing there, and is not lost on what would follow."""

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
        # In another thread whoever owns the main one handles the signals.
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
        # The signal may come in the middle of a line of output, which Python refuses to write into with a RuntimeError;
        # the run must not end for that, and its last line says that it stopped.
        with contextlib.suppress(RuntimeError):
            when = "after this step" if self._end_early is None else "after this step, or at once while it samples"
            self.note(f"stopping {when}; press Ctrl-C again to stop now")

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._watcher is not None:
            self._watcher.join()
        for number, handler in self.previous.items():
            signal.signal(number, handler)
