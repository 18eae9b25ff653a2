"""A background thread that can be paused. After `stop()` returns, the caller has exclusive access to what the thread works on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

POLL_INTERVAL_S = 0.2


class PausableThread:
    """Calls `work` repeatedly while `has_work()`, between `run` and `stop`. `interrupt` makes a running call of `work` return soon.

    An error of `work` ends the thread and is raised by `check` and `stop`. Both sides wait on the condition `changed`.
    """

    def __init__(
        self, work: Callable[[], None], has_work: Callable[[], bool], interrupt: Callable[[], None], name: str
    ) -> None:
        self.changed = threading.Condition()
        self._work, self._has_work, self._interrupt, self._name = work, has_work, interrupt, name
        self._thread: threading.Thread | None = None
        self._is_on = self._is_busy = self._is_closing = False
        self._error: BaseException | None = None
        self._worked_s = 0.0

    def run(self) -> None:
        """Start, or resume after `stop`."""
        with self.changed:
            self._is_on = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self.changed.notify_all()

    def stop(self) -> None:
        """Pause until `run`. Returns when the current call of `work` has ended; its waits have deadlines."""
        with self.changed:
            self._is_on = False
            while self._is_busy:
                self._interrupt()
                self.changed.wait(POLL_INTERVAL_S)
        self.check()

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def take_worked_s(self) -> float:
        """Seconds spent in `work` since the last call of this method."""
        with self.changed:
            worked_s, self._worked_s = self._worked_s, 0.0
        return worked_s

    def close(self, timeout_s: float) -> None:
        """End the thread. Waits at most `timeout_s` for the current call of `work`."""
        with self.changed:
            self._is_closing, self._is_on = True, False
            self.changed.notify_all()
        if self._thread is not None:
            self._interrupt()
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._is_closing or (self._is_on and self._has_work()))
                if self._is_closing:
                    return
                self._is_busy = True
            started = time.perf_counter()
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001 (raised by `check` and `stop`)
                self._error = error
            with self.changed:
                self._worked_s += time.perf_counter() - started
                self._is_busy = False
                self.changed.notify_all()
                if self._error is not None:
                    return
