"""An engine in a thread of its own: requests go in and completions come out while it samples.

The engine is touched by that thread alone. What is asked of it waits in an inbox, which the thread reads whenever it is outside
`Engine.stream`; asking interrupts the stream, so it is read within a step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from burnish.core.engine import Completion, Engine, Request

Result = TypeVar("Result")


class EngineThread:
    """Runs an engine until `close`. An error of the engine ends the thread, and is raised by everything asked afterwards."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_unfinished = 0
        """Requests that were submitted and not collected."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finished: list[Completion] = []
        self._running: set[str] = set()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. One that can never run is an error of the next `collect`: whoever submits does not wait."""
        with self._changed:
            self.num_unfinished += len(requests)

        def take() -> None:
            self.engine.submit(requests)
            self._running |= {request.id for request in requests}

        self._ask(take)

    def collect(self, at_least: int, wait_s: float) -> list[Completion]:
        """What has finished since the last time: as soon as there are so many, or nothing else is left, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._finished) >= max(1, min(at_least, self.num_unfinished)) or self._error is not None,
                wait_s,
            )
            if self._error is not None:
                raise self._error
            found, self._finished = self._finished, []
            self.num_unfinished -= len(found)
        return found

    def do(self, action: Callable[[Engine], Result]) -> Result:
        """Something with the engine, between two of its steps; waits for it."""
        return self.wait(self.begin(action))

    def begin(self, action: Callable[[Engine], Result]) -> Future[Result]:
        """The same without waiting."""
        done: Future[Result] = Future()

        def act() -> None:
            try:
                done.set_result(action(self.engine))
            except Exception as error:  # noqa: BLE001 (it is the asker's)
                done.set_exception(error)

        self._ask(act)
        return done

    def wait(self, done: Future[Result]) -> Result:
        """What came of something that was begun."""
        while True:
            try:
                return done.result(timeout=1.0)
            except TimeoutError:
                if done.done():  # the result came just then, or is this error
                    return done.result()
                if self._error is not None:
                    raise self._error from None

    def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Stop requests that run or wait, and return what they have; those that have finished are collected as ever."""

        def stop(engine: Engine) -> list[Completion]:
            stopped = engine.abort([id for id in ids if id in self._running], keep=True)
            self._running -= {completion.id for completion in stopped}
            return stopped

        stopped = self.do(stop)
        with self._changed:
            self.num_unfinished -= len(stopped)
        return stopped

    def close(self) -> None:
        """End the thread after the step it is in; what is unfinished is dropped."""
        if self._is_closing:
            return
        self._is_closing = True
        self._ask(lambda: None)

    def _ask(self, action: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        self._inbox.put(action)
        self.engine.interrupt()  # after the put: whoever comes out of `stream` for this finds it

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._read_inbox()
                for completion in self.engine.stream() if not self._is_closing else ():
                    self._running.discard(completion.id)
                    with self._changed:
                        self._finished.append(completion)
                        self._changed.notify_all()
            self._end(RuntimeError("the engine's thread was closed"))
        except BaseException as error:  # noqa: BLE001 (raised by whatever is asked next)
            self._end(error)

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _read_inbox(self) -> None:
        """Do what was asked for; where nothing runs, wait until something is."""
        while not self._is_closing:
            try:
                action: Any = self._inbox.get(block=not self._running)
            except queue.Empty:
                return
            action()
