"""An asynchronous interface to an engine, for the event loop.

The engine runs in a thread or in a process of its own (`engine_worker`, `engine_process`). Requests and cancellations go to it as messages,
and its tokens and completions come back in batches, one for each wake-up of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import Any, Protocol, TypeVar

from burnish.core.engine import Completion, Request
from burnish.gateway.openai_responses import EngineEvent
from burnish.gateway.openai_schema import ApiError
from burnish.serve.engine_worker import Abort, Call, CallResult, CancelCall, EngineFailure, FromEngine, Submit, ToEngine

T = TypeVar("T")
RETRY_AFTER_S = 1


class EngineHost(Protocol):
    """Where the engine runs."""

    @property
    def num_waiting(self) -> int:
        """Requests in the engine's waiting queue."""

    def start(self, wake: Callable[[], None]) -> None:
        """Start; `wake` is called, on any thread, when `take` has something."""

    def send(self, message: ToEngine) -> None:
        """Give a message to the engine."""

    def take(self) -> list[FromEngine]:
        """All messages from the engine since the last call."""

    def stop(self) -> None:
        """Drop unfinished requests and end. Further calls do nothing."""


class Generation:
    """Requests that were submitted together, on the side of the event loop."""

    def __init__(self, owner: AsyncEngine, requests: Sequence[Request], wants_tokens: bool) -> None:
        self.requests, self.wants_tokens = requests, wants_tokens
        self.num_unfinished = len(requests)
        self.number = next(owner.numbers)
        self._owner = owner
        self._is_cancelled = False
        self._events: list[EngineEvent] = []  # since the last batch
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for events

    async def events(self) -> AsyncIterator[list[EngineEvent]]:
        """Yield batches of events until the last request has ended; raise what the engine raised.

        A batch has all events since the last one, so a slow reader gets larger batches.
        """
        num_left = len(self.requests)
        while num_left:
            if not self._events and self._error is None:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            if not self._events and self._error is not None:
                raise self._error
            batch, self._events = self._events, []
            num_left -= sum(isinstance(event.payload, Completion) for event in batch)
            yield batch

    def cancel(self) -> None:
        """Abort the unfinished requests. Further calls do nothing."""
        if self.num_unfinished and not self._is_cancelled:
            self._is_cancelled = True
            self._owner.abort(self)

    def put(self, event: EngineEvent | Exception) -> None:
        """Add an event or an error, after which there are no events; called on the event loop."""
        if not isinstance(event, Exception):
            self._events.append(event)
        elif self._error is None:
            self._error = event
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AsyncEngine:
    """The engine of a host, from `start` to `stop`.

    `max_unfinished` bounds the running and waiting requests; above it `submit` raises an error with status 429. When the engine fails, all open
    generations get the error, and `on_failure` is called.
    """

    def __init__(self, host: EngineHost, max_unfinished: int) -> None:
        self.host, self.max_unfinished = host, max_unfinished
        self.num_unfinished = 0
        self.num_tokens = 0  # of all ended completions
        self.finishes: Counter[str] = Counter()
        self.failure: EngineFailure | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.numbers = count()
        """The numbers of generations and calls."""
        self._open: dict[int, Generation] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._room_lock = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None  # of the holder of the lock
        self._num_queued = 0
        self._is_closed = False
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the engine. Events go to the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self.host.start(self._wake)

    def stop(self) -> None:
        """End the engine after its present step."""
        self.host.stop()

    def close(self) -> None:
        """Refuse new requests, and end all open generations with a shutdown error."""
        self._is_closed = True
        for generation in list(self._open.values()):
            generation.put(_shutting_down())
            generation.cancel()
        self._end_calls(_shutting_down())
        self._tell_room()

    @property
    def num_waiting(self) -> int:
        """Requests in the engine's waiting queue."""
        return min(self.host.num_waiting, self.num_unfinished)

    @property
    def num_running(self) -> int:
        """Requests that are being sampled."""
        return self.num_unfinished - self.num_waiting

    def check_room(self, num: int) -> None:
        """Raise if `num` more requests cannot be accepted, now or ever."""
        self.check_open()
        if num > self.max_unfinished:
            message = f"{num} completions are asked for at once; the server holds at most {self.max_unfinished}"
            raise ApiError(400, message, param="n", code="too_many_completions")
        taken = self.max_unfinished - self._num_free + self._num_queued
        if taken + num > self.max_unfinished:
            message = f"the queue is full: {taken} of {self.max_unfinished} completions are unfinished; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})

    def check_open(self) -> None:
        """Raise if no more requests are accepted."""
        if self.failure is not None:
            raise ApiError(503, "the engine has failed, and the server is going down", code="engine_failed")
        if self._is_closed:
            raise _shutting_down()

    @property
    def _num_free(self) -> int:
        """How many more requests may be unfinished; calls count as requests."""
        return self.max_unfinished - self.num_unfinished - len(self._calls)

    def submit(self, requests: Sequence[Request], wants_tokens: bool) -> Generation:
        """Submit requests. With `wants_tokens` there is an event for every token, not only for completions."""
        self.check_room(len(requests))
        return self._submit(requests, wants_tokens)

    async def submit_when_free(self, requests: Sequence[Request]) -> Generation:
        """Wait until there is room, and submit as many of the requests as there is room for, the first ones.

        For searches, whose later requests belong to a request that was accepted. Those that wait come in turn, and count as one request
        each, so that requests which come later do not take their room.
        """
        self._num_queued += 1
        try:
            async with self._room_lock:
                self.check_open()
                while self._num_free < 1:
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
                    self.check_open()
                return self._submit(requests[: self._num_free], wants_tokens=False)
        finally:
            self._num_queued -= 1

    def _tell_room(self) -> None:
        """Wake the first one that waits for room, if there is some or the engine has ended."""
        is_over = self._is_closed or self.failure is not None
        if self._room is not None and not self._room.done() and (is_over or self._num_free > 0):
            self._room.set_result(None)

    def _submit(self, requests: Sequence[Request], wants_tokens: bool) -> Generation:
        generation = Generation(self, requests, wants_tokens)
        self.num_unfinished += len(requests)
        self._open[generation.number] = generation
        self.host.send(Submit(generation.number, requests, wants_tokens))
        return generation

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine's thread between two steps, so that it may use the engine's model; return its result.

        Calls count as unfinished requests, but are never refused: each belongs to a request that was accepted.
        """
        self.check_open()
        number, future = next(self.numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self.host.send(Call(number, work))
            result: T = await future
            return result
        finally:
            del self._calls[number]
            self._tell_room()
            if future.cancelled():
                self.host.send(CancelCall(number))

    def _end_calls(self, error: Exception) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def abort(self, generation: Generation) -> None:
        """Abort the unfinished requests of a generation."""
        self.host.send(Abort(generation.number))

    def _wake(self) -> None:
        """Called by the host on a thread of its own."""
        assert self._event_loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and all requests have ended
            self._event_loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        for item in self.host.take():
            if isinstance(item, EngineFailure):
                self._fail(item)
            elif isinstance(item, CallResult):
                self._end_call(item)
            elif (generation := self._open.get(item.generation)) is not None:
                if isinstance(item.payload, Exception):
                    self._dispatch(generation, item.payload)
                else:
                    self._dispatch(generation, EngineEvent(item.request_index, item.payload))

    def _fail(self, failure: EngineFailure) -> None:
        self.failure = failure
        for generation in list(self._open.values()):
            self._dispatch(generation, failure)
        self._end_calls(failure)
        self._tell_room()
        self.on_failure()

    def _end_call(self, item: CallResult) -> None:
        future = self._calls.get(item.number)
        if future is None or future.done():  # the client disconnected, or the server shuts down
            return
        if item.error is None:
            future.set_result(item.result)
        else:
            future.set_exception(item.error)

    def _dispatch(self, generation: Generation, event: EngineEvent | Exception) -> None:
        ended = 0
        if isinstance(event, Exception):
            ended = generation.num_unfinished
        elif isinstance(event.payload, Completion):
            ended = 1
            self.num_tokens += len(event.payload.tokens)
            self.finishes[event.payload.finish] += 1
        generation.num_unfinished -= ended
        self.num_unfinished -= ended
        if not generation.num_unfinished:
            self._open.pop(generation.number, None)
        generation.put(event)
        self._tell_room()


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
