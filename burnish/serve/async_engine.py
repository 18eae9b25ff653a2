"""The thread that owns the engine, and what the event loop holds of it.

The engine is touched by one thread only. Requests and cancellations reach it through an inbox, which it reads whenever it is
outside `Engine.stream`; putting something in interrupts the stream, so that it is read within a step. Tokens and completions
travel the other way through an outbox that the event loop empties; one wake-up serves everything that came meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Engine, Request
from burnish.serve.openai_schema import ApiError

T = TypeVar("T")
Listener = Callable[[str, int], None]
RETRY_AFTER_S = 1
MAX_STEP_S = 30


class EngineFailure(RuntimeError):
    """The engine broke down; what it raised is the cause."""


@dataclass(frozen=True)
class EngineEvent:
    """Something happened to one request: a token was drawn, or it ended."""

    index: int
    """Which of the generation's requests."""
    what: int | Completion


class Generation:
    """Requests submitted together, as the event loop sees them."""

    def __init__(self, loop: AsyncEngine, requests: Sequence[Request], wants_tokens: bool) -> None:
        self.requests, self.wants_tokens = requests, wants_tokens
        self.num_unfinished = len(requests)
        self._loop = loop
        self._is_cancelled = False
        self._events: asyncio.Queue[EngineEvent | Exception] = asyncio.Queue()

    async def events(self) -> AsyncIterator[list[EngineEvent]]:
        """Yield the events until the last request has ended. A batch has all events since the one before, so a slow reader gets
        larger batches. Raises what the engine raised."""
        num_left = len(self.requests)
        while num_left:
            batch = [self._take(await self._events.get())]
            while not self._events.empty():
                batch.append(self._take(self._events.get_nowait()))
            num_left -= sum(isinstance(event.what, Completion) for event in batch)
            yield batch

    @staticmethod
    def _take(event: EngineEvent | Exception) -> EngineEvent:
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self) -> None:
        """Stop what is still running; nothing happens when nothing is, or when it was said before."""
        if self.num_unfinished and not self._is_cancelled:
            self._is_cancelled = True
            self._loop.abort(self)

    def hear(self, event: EngineEvent | Exception) -> None:
        """Called by the loop, in order."""
        self._events.put_nowait(event)


class AsyncEngine:
    """Runs an engine in a thread of its own, from `start` to `stop`.

    `max_unfinished` bounds the requests that run or wait; past it `submit` refuses with 429. An engine that raises anything
    but a `UserError` is used no more, since its state is unknown: all open generations get the error, and `on_failure` is called.
    """

    def __init__(self, make_engine: Callable[[Listener], Engine], max_unfinished: int) -> None:
        self.engine = make_engine(self._hear)
        self.max_unfinished = max_unfinished
        self.num_unfinished = 0
        self.num_tokens = 0  # of all completions that ended
        self.finishes: Counter[str] = Counter()
        self.failure: EngineFailure | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._open: set[Generation] = set()  # of the event loop
        self._calls: set[asyncio.Future[Any]] = set()  # of the event loop
        self._running: dict[str, tuple[Generation, int]] = {}  # of the thread, by the request's id
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: deque[tuple[Generation, EngineEvent | Exception] | EngineFailure] = deque()
        self._is_woken = False
        self._is_closed = False
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None

    # --- on the event loop -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; events go to the event loop that runs now."""
        self._event_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Refuse new requests, and end all open generations with the error that the server shuts down."""
        self._is_closed = True
        for generation in list(self._open):
            generation.hear(_shutting_down())
            generation.cancel()
        self._end_calls(_shutting_down())

    @property
    def num_waiting(self) -> int:
        """Requests in the engine's queue."""
        queue: Sized = getattr(self.engine, "waiting", ())  # engines without a queue start every request at once
        return min(len(queue), self.num_unfinished)

    @property
    def num_running(self) -> int:
        """Requests that are being sampled."""
        return self.num_unfinished - self.num_waiting

    def stop(self) -> None:
        """Drop what is unfinished and end the thread after the step it is in. A step that takes too long is left behind."""
        if self._thread is not None:
            self._send(self._stop)
            self._thread.join(MAX_STEP_S)
            self._thread = None

    def check_room(self, num: int) -> None:
        """Raise if so many more requests cannot be taken, now or ever."""
        self.check_open()
        if num > self.max_unfinished:
            message = f"{num} completions are asked for at once; the server holds at most {self.max_unfinished}"
            raise ApiError(400, message, param="n", code="too_many_completions")
        if self.num_unfinished + len(self._calls) + num > self.max_unfinished:
            message = f"the queue is full: {self.num_unfinished + len(self._calls)} of {self.max_unfinished} completions are unfinished; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})

    def check_open(self) -> None:
        """Raise if nothing more is taken."""
        if self.failure is not None:
            raise ApiError(503, "the engine has failed, and the server is going down", code="engine_failed")
        if self._is_closed:
            raise _shutting_down()

    def submit(self, requests: Sequence[Request], wants_tokens: bool) -> Generation:
        """Hand requests over; `wants_tokens` asks for an event for every token, and not only at the end."""
        self.check_room(len(requests))
        generation = Generation(self, requests, wants_tokens)
        self.num_unfinished += len(requests)
        self._open.add(generation)
        self._send(lambda: self._submit(generation))
        return generation

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, called on the engine's thread between two steps: it may use the engine's model.

        Calls take room from requests, but are not refused for lack of it: each belongs to a request that was taken.
        """
        self.check_open()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: Exception | None) -> None:
            if future.done():  # the client has left, or the server ends
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def action() -> None:
            if future.cancelled():
                return
            result, error = None, None
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 (the caller has it; the engine was not touched)
                error = raised
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(tell, result, error)

        self._calls.add(future)
        try:
            self._send(action)
            return await future
        finally:
            self._calls.discard(future)

    def _end_calls(self, error: Exception) -> None:
        for future in self._calls:
            if not future.done():
                future.set_exception(error)

    def abort(self, generation: Generation) -> None:
        """Stop what is left of a generation."""
        self._send(lambda: self._abort(generation))

    def _send(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self.engine.interrupt()  # after the put, so that the engine's thread finds the action when `stream` returns

    def _deliver(self) -> None:
        self._is_woken = False  # before emptying: what comes from here on wakes again
        while self._outbox:
            item = self._outbox.popleft()
            if isinstance(item, EngineFailure):
                for generation in list(self._open):
                    self._tell(generation, item)
                self._end_calls(item)
                self.on_failure()
            else:
                self._tell(*item)

    def _tell(self, generation: Generation, event: EngineEvent | Exception) -> None:
        ended = 0
        if isinstance(event, Exception):
            ended = generation.num_unfinished
        elif isinstance(event.what, Completion):
            ended = 1
            self.num_tokens += len(event.what.tokens)
            self.finishes[event.what.finish] += 1
        generation.num_unfinished -= ended
        self.num_unfinished -= ended
        if not generation.num_unfinished:
            self._open.discard(generation)
        generation.hear(event)

    # --- on the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_inbox()
            while not self._is_stopping:
                for completion in self.engine.stream():
                    self._end(completion)
                self._read_inbox()
        except Exception as error:  # noqa: BLE001 (all open generations get it, and the server ends with it)
            self.failure = EngineFailure(f"the engine failed: {type(error).__name__}: {error}")
            self.failure.__cause__ = error
            self._post(self.failure)

    def _read_inbox(self) -> None:
        """Do what was asked for; where nothing runs, wait until something is."""
        while not self._is_stopping:
            try:
                action = self._inbox.get(block=not self._running)
            except queue.Empty:
                return
            action()

    def _stop(self) -> None:
        self._is_stopping = True
        self.engine.abort(list(self._running), keep=False)
        self._running.clear()

    def _submit(self, generation: Generation) -> None:
        try:
            self.engine.submit(generation.requests)
        except UserError as error:  # one of them can never run, and none was taken
            self._post((generation, error))
            return
        self._running.update({request.id: (generation, i) for i, request in enumerate(generation.requests)})

    def _abort(self, generation: Generation) -> None:
        ids = [request.id for request in generation.requests if request.id in self._running]
        # What does not come back could not be stopped, and ends by itself.
        for completion in self.engine.abort(ids, keep=True) if ids else []:
            self._end(completion)

    def _hear(self, request_id: str, token: int) -> None:
        generation, index = self._running[request_id]
        if generation.wants_tokens:
            self._post((generation, EngineEvent(index, token)))

    def _end(self, completion: Completion) -> None:
        generation, index = self._running.pop(completion.id)
        self._post((generation, EngineEvent(index, completion)))

    def _post(self, item: tuple[Generation, EngineEvent | Exception] | EngineFailure) -> None:
        self._outbox.append(item)
        if not self._is_woken:
            self._is_woken = True
            assert self._event_loop is not None
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and all requests with it
                self._event_loop.call_soon_threadsafe(self._deliver)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
