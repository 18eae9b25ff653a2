"""One piece of work beside the main thread, whose result or error is never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """At most one piece of work at a time; whoever gave it picks up what came of it.

    The thread does not outlive the process: work that a kill may interrupt anywhere may also be interrupted by an exit.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: list[Result] = []
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing under way and nothing to pick up."""
        return self._thread is None

    def start(self, work: Callable[[], Result], name: str) -> None:
        """Begin; what came of the work before must have been picked up."""
        assert self.is_idle
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the work has ended (also if there is none), after at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def pick_up(self) -> Result:
        """The result of work that has ended, once; its error is raised here, as it was raised there."""
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result.pop()

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._result.append(work())
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is raised again where it can be heard
            self._error = error
