"""Signs of life: a small file in the run directory that says in which step and phase the driver is.

It is rewritten whenever something moves: a step, a phase, a completion. The supervisor (`supervise.py`) ends a driver whose
file has not changed for too long, and names the phase in which that happened, or in which the driver died.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from burnish.config.errors import UserError
from burnish.run.display import Display

FILE = "heartbeat.json"
SIZE = 512
"""Bytes of the record, whatever it says: it is written over in one piece."""
EVERY_S = 0.25
"""Between two records that differ in nothing but a count."""
DIGITS = str.maketrans("", "", "0123456789")


@dataclass(frozen=True)
class Beat:
    """Where the driver was, and the how many-th time it said so."""

    step: int
    phase: str
    count: int

    def __str__(self) -> str:
        return ", ".join(([f"step {self.step}"] if self.step else []) + ([f"{self.phase!r}"] if self.phase else []))


def read_beat(path: Path, pid: int) -> Beat | None:
    """The last record of a driver; None where it has written none, or is just writing it."""
    try:
        record = json.loads(path.read_bytes())
        return Beat(record["step"], record["phase"], record["count"]) if record["pid"] == pid else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


class Heartbeat:
    """Writes the records of one driver."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._count, self._written, self._kind = 0, -EVERY_S, ""
        self.beat(0, "starting")

    def beat(self, step: int, phase: str) -> None:
        """Something moved. Cheap: of many calls in a moment that differ in a count alone, one is written."""
        now, kind = self._clock(), f"{step}|{phase.translate(DIGITS)}"
        if kind == self._kind and now - self._written < EVERY_S:
            return
        self._count, self._written, self._kind = self._count + 1, now, kind
        record = {"step": step, "phase": phase[:60], "count": self._count, "pid": os.getpid(), "time": time.time()}
        try:
            os.pwrite(self._file, json.dumps(record).ljust(SIZE - 1).encode()[: SIZE - 1] + b"\n", 0)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


class BeatingDisplay(Display):
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
