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
LOOK_EVERY_S = 0.2
ONCE_S = 0.5
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
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self.previous[number] = signal.signal(number, self._handle)
        if self._end_early is not None:
            self._watcher = threading.Thread(target=self._watch, name="stop on interrupt", daemon=True)
            self._watcher.start()
        return self

    def _watch(self) -> None:
        assert self._end_early is not None
        while not self._is_over.wait(LOOK_EVERY_S):
            if self.requested:
                self._end_early()

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
            when = "after this step" if self._end_early is None else "after this step, or at once while it samples"
            self.note(f"stopping {when}; press Ctrl-C again to stop now")

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._watcher is not None:
            self._watcher.join()
        for number, handler in self.previous.items():
            signal.signal(number, handler)
