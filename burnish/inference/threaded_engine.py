"""An engine in a thread of its own: it accepts requests and returns completions while it samples.

Only that thread uses the engine. Calls go to an inbox, which the thread reads whenever it is outside of `Engine.stream`. A new entry
interrupts the stream, so it is read within one step.
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
    """Runs an engine until `close`. An error of the engine ends the thread, and all later calls raise it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_unfinished = 0
        """Requests that were submitted and not collected yet."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finished: list[Completion] = []
        self._running: set[str] = set()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests without waiting. The next `collect` raises for one that can never run."""
        with self._changed:
            self.num_unfinished += len(requests)

        def take() -> None:
            self.engine.submit(requests)
            self._running |= {request.id for request in requests}

        self._ask(take)

    def collect(self, at_least: int, wait_s: float) -> list[Completion]:
        """Return completions since the last call, once there are `at_least` many, none is left, or `wait_s` has passed."""
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
        """Run an action with the engine between two steps; wait for its result."""
        return self.wait(self.begin(action))

    def begin(self, action: Callable[[Engine], Result]) -> Future[Result]:
        """Run an action with the engine between two steps, without waiting."""
        done: Future[Result] = Future()

        def act() -> None:
            try:
                done.set_result(action(self.engine))
            except Exception as error:  # noqa: BLE001 (raised by `wait`)
                done.set_exception(error)

        self._ask(act)
        return done

    def wait(self, done: Future[Result]) -> Result:
        """Wait for the result of `begin`; raise if the engine fails."""
        while True:
            try:
                return done.result(timeout=1.0)
            except TimeoutError:
                if done.done():  # the result came just now, or is itself a TimeoutError
                    return done.result()
                if self._error is not None:
                    raise self._error from None

    def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Abort running and waiting requests; return their tokens so far. Finished ones are returned by `collect`."""

        def stop(engine: Engine) -> list[Completion]:
            stopped = engine.abort([id for id in ids if id in self._running], keep=True)
            self._running -= {completion.id for completion in stopped}
            return stopped

        stopped = self.do(stop)
        with self._changed:
            self.num_unfinished -= len(stopped)
        return stopped

    def close(self) -> None:
        """End the thread after its present step. Unfinished requests are dropped."""
        if self._is_closing:
            return
        self._is_closing = True
        self._ask(lambda: None)

    def _ask(self, action: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        self._inbox.put(action)
        self.engine.interrupt()  # after the put, so that the thread finds the action when `stream` returns

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
        except BaseException as error:  # noqa: BLE001 (raised by the next call)
            self._end(error)

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _read_inbox(self) -> None:
        """Run the actions in the inbox; wait for one if no request runs."""
        while not self._is_closing:
            try:
                action: Any = self._inbox.get(block=not self._running)
            except queue.Empty:
                return
            action()
