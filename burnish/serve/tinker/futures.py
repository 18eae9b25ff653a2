"""Futures of requests, which clients poll, and the order in which the requests of a model run.

A request gets a future at once. Its result is kept until a client has fetched it, and for some minutes more, since an answer can
be lost on its way. Requests of a model carry numbers from 1 on. They may arrive out of order, because a client sends the parts of
a large batch at once; each waits for those before it. A number that never arrives fails the requests behind it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from burnish.serve.tinker.responses import Failure, Result

DELIVERED_S = 300.0
"""How long a result is kept after it was fetched first."""
GAP_S = 300.0
"""How long a request waits for one before it that has not arrived."""


@dataclass
class _Entry:
    session_id: str
    result: Result | None = None
    delivered_at: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Futures:
    """The futures of all requests. Used on the event loop, but for `resolve`, which any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop, once the server runs."""
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def begin(self, request_id: str, session_id: str) -> None:
        """Make a future."""
        self._drop_delivered()
        self._entries[request_id] = _Entry(session_id)

    def resolve(self, request_id: str, result: Result) -> None:
        """Set a result, from any thread. A future that was dropped meanwhile is ignored."""
        assert self.loop is not None, "set when the server starts"
        self.loop.call_soon_threadsafe(self._set, request_id, result)

    def _set(self, request_id: str, result: Result) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.result is None:
            entry.result = result
            entry.done.set()

    async def wait(self, request_id: str, seconds: float) -> Result | None:
        """The result, or None if there is none after some seconds; KeyError for an unknown future."""
        entry = self._entries[request_id]
        try:
            await asyncio.wait_for(entry.done.wait(), seconds)
        except TimeoutError:
            return None
        if entry.delivered_at is None:
            entry.delivered_at = self.clock()
        return entry.result

    def drop_session(self, session_id: str) -> None:
        """Forget the futures of a session."""
        for request_id in [name for name, entry in self._entries.items() if entry.session_id == session_id]:
            self._entries[request_id].done.set()
            del self._entries[request_id]

    def _drop_delivered(self) -> None:
        limit = self.clock() - DELIVERED_S
        old = [
            name
            for name, entry in self._entries.items()
            if entry.delivered_at is not None and entry.delivered_at < limit
        ]
        for name in old:
            del self._entries[name]


@dataclass(frozen=True)
class OrderedTask:
    """A request of a model: `start` hands it to the worker, `fail` ends it without running it."""

    start: Callable[[], None]
    fail: Callable[[Failure], None]


class RequestOrder:
    """Starts the requests of one model in the order of their numbers. Used on the event loop."""

    def __init__(self, name: str, gap_s: float = GAP_S) -> None:
        self.name, self.gap_s = name, gap_s
        self.next = 1
        self._waiting: dict[int, OrderedTask] = {}
        self._timer: asyncio.TimerHandle | None = None

    def is_known(self, number: int) -> bool:
        """Whether a request with this number has arrived before: a client repeats one whose answer was lost."""
        return number < self.next or number in self._waiting

    def put(self, number: int | None, task: OrderedTask) -> None:
        """Start a request when all before it have started; one without a number at once."""
        if number is None:
            task.start()
            return
        self._waiting[number] = task
        while self.next in self._waiting:
            self._waiting.pop(self.next).start()
            self.next += 1
            self._set_timer(None)
        if self._waiting and self._timer is None:
            self._set_timer(self.gap_s)

    def close(self, failure: Failure) -> None:
        """Fail all requests that wait."""
        self._set_timer(None)
        waiting, self._waiting = self._waiting, {}
        for task in waiting.values():
            task.fail(failure)
        self.next = max([self.next, *(number + 1 for number in waiting)])

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        text = (
            f"request {self.next} of {self.name} did not arrive within {self.gap_s:g} s, so the requests behind it cannot run: its "
            "sending failed, or the client ended; load the last saved state before you go on"
        )
        self.close(Failure(text, "server"))
