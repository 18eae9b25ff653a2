"""Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopOnInterrupt:
    """The first Ctrl-C lets the step finish and be saved; the second stops at once (the journal keeps what is done)."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.requested = note, False
        self.previous: Any = None

    def __enter__(self) -> StopOnInterrupt:
        try:
            self.previous = signal.signal(signal.SIGINT, self._handle)
        except ValueError:  # not the main thread: whoever owns it handles the signal
            self.previous = None
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.note("stopping after this step; press Ctrl-C again to stop now")

    def __exit__(self, *_: object) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
