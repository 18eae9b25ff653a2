"""A thread for the synchronous code of one user object, so that it blocks neither the event loop nor the objects of other episodes."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

Job = Callable[[], None]


class UserThread:
    """A daemon thread that runs the calls of one object in order. It starts with the first call and ends with this object.

    All calls of an object are in one thread, because some libraries (sqlite3) refuse objects that another thread made.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_started = False

    async def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the function in the thread and return its result, awaited if it is a coroutine.

        A thread cannot be cancelled. After a cancellation this call stays unfinished until the function returns, so that the process that
        hosts the object sees how many calls were left behind.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def job() -> None:
            result, raised = None, None
            try:
                result = function(*arguments, **options)
            except BaseException as error:  # noqa: BLE001 (raised again in the event loop)
                raised = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, outcome, (result, raised))

        self._start()
        self._jobs.put(job)
        try:
            result, raised = await asyncio.shield(outcome)
        except asyncio.CancelledError:
            await asyncio.wait([outcome])
            raise
        if isinstance(raised, Exception):
            raise raised
        if raised is not None:  # SystemExit would end the event loop, and with it the episodes of all other objects
            raise RuntimeError(f"user code raised {type(raised).__name__}: {raised}") from raised
        return await result if inspect.isawaitable(result) else result

    async def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of the user: an `async def` function in the event loop, any other in the thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **options)
        return await self.run(function, *arguments, **options)

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            # The thread holds the queue only: this object can be collected, and the finalizer then ends the thread.
            threading.Thread(target=_work, args=(self._jobs,), name="user-code", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # an idle thread keeps nothing alive


def _set(outcome: asyncio.Future[Any], value: Any) -> None:
    if not outcome.done():
        outcome.set_result(value)
