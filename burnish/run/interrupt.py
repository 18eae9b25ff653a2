"""Ctrl-C, and the SIGTERM of a batch system, that lose nothing."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONCE_S = 0.5
"""Signals that follow each other faster are one: batch systems signal every process of a job, and the supervisor passes its own on."""


class StopOnInterrupt:
    """The first signal lets the step finish and be saved; the second stops at once (the journal keeps what is done)."""

    num_heard: ClassVar[int] = 0
    """Signals of this process so far: one that comes in the last step changes nothing there, and is not lost on what would follow."""

    def __init__(self, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.note, self.requested = note, False
        self.previous: dict[int, Any] = {}
        self._clock, self._heard = clock, 0.0

    def __enter__(self) -> StopOnInterrupt:
        # In another thread whoever owns the main one handles the signals.
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self.previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, before = self._clock(), self._heard
        self._heard = now
        StopOnInterrupt.num_heard += 1
        if self.requested:
            if now - before < ONCE_S:
                return
            raise KeyboardInterrupt
        self.requested = True
        # The signal may come in the middle of a line of output, which Python refuses to write into with a RuntimeError;
        # the run must not end for that, and its last line says that it stopped.
        with contextlib.suppress(RuntimeError):
            self.note("stopping after this step; press Ctrl-C again to stop now")

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
