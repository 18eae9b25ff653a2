"""An engine in a thread of its own, with an asynchronous interface for the event loop.

Only that thread uses the engine. Requests and cancellations go to an inbox, which the thread reads whenever it is outside of
`Engine.stream`; a new entry interrupts the stream, so it is read within one step. Tokens and completions go to an outbox that the
event loop empties; one wake-up delivers all entries that have come until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from typing import Any, TypeVar

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Engine, Request
from burnish.gateway.openai_responses import EngineEvent
from burnish.gateway.openai_schema import ApiError

T = TypeVar("T")
Listener = Callable[[str, int], None]
RETRY_AFTER_S = 1
MAX_STEP_S = 30


class EngineFailure(RuntimeError):
    """The engine raised an unexpected error, which is the cause."""


class Generation:
    """Requests that were submitted together, on the side of the event loop."""

    def __init__(self, owner: AsyncEngine, requests: Sequence[Request], wants_tokens: bool) -> None:
        self.requests, self.wants_tokens = requests, wants_tokens
        self.num_unfinished = len(requests)
        self._owner = owner
        self._is_cancelled = False
        self._events: asyncio.Queue[EngineEvent | Exception] = asyncio.Queue()

    async def events(self) -> AsyncIterator[list[EngineEvent]]:
        """Yield batches of events until the last request has ended; raise what the engine raised.

        A batch has all events since the last one, so a slow reader gets larger batches.
        """
        num_left = len(self.requests)
        while num_left:
            batch = [self._take(await self._events.get())]
            while not self._events.empty():
                batch.append(self._take(self._events.get_nowait()))
            num_left -= sum(isinstance(event.payload, Completion) for event in batch)
            yield batch

    @staticmethod
    def _take(event: EngineEvent | Exception) -> EngineEvent:
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self) -> None:
        """Abort the unfinished requests. Further calls do nothing."""
        if self.num_unfinished and not self._is_cancelled:
            self._is_cancelled = True
            self._owner.abort(self)

    def put(self, event: EngineEvent | Exception) -> None:
        """Add an event or an error; called on the event loop."""
        self._events.put_nowait(event)


class AsyncEngine:
    """Runs an engine in a thread of its own, from `start` to `stop`.

    `max_unfinished` bounds the running and waiting requests; above it `submit` raises an error with status 429. An engine that raises
    anything but a `UserError` is not used again, since its state is unknown: all open generations get the error, and `on_failure`
    is called.
    """

    def __init__(self, make_engine: Callable[[Listener], Engine], max_unfinished: int) -> None:
        self.engine = make_engine(self._on_token)
        self.max_unfinished = max_unfinished
        self.num_unfinished = 0
        self.num_tokens = 0  # of all ended completions
        self.finishes: Counter[str] = Counter()
        self.failure: EngineFailure | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._open: set[Generation] = set()  # used on the event loop
        self._calls: set[asyncio.Future[Any]] = set()  # used on the event loop
        self._running: dict[str, tuple[Generation, int]] = {}  # used on the thread, by request id
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: deque[tuple[Generation, EngineEvent | Exception] | EngineFailure] = deque()
        self._is_woken = False
        self._is_closed = False
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None

    # --- on the event loop -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Events go to the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Refuse new requests, and end all open generations with a shutdown error."""
        self._is_closed = True
        for generation in list(self._open):
            generation.put(_shutting_down())
            generation.cancel()
        self._end_calls(_shutting_down())

    @property
    def num_waiting(self) -> int:
        """Requests in the engine's waiting queue."""
        queue: Sized = getattr(self.engine, "waiting", ())  # engines without a queue start every request at once
        return min(len(queue), self.num_unfinished)

    @property
    def num_running(self) -> int:
        """Requests that are being sampled."""
        return self.num_unfinished - self.num_waiting

    def stop(self) -> None:
        """Drop unfinished requests and end the thread after its present step, waiting at most `MAX_STEP_S`."""
        if self._thread is not None:
            self._send(self._stop)
            self._thread.join(MAX_STEP_S)
            self._thread = None

    def check_room(self, num: int) -> None:
        """Raise if `num` more requests cannot be accepted, now or ever."""
        self.check_open()
        if num > self.max_unfinished:
            message = f"{num} completions are asked for at once; the server holds at most {self.max_unfinished}"
            raise ApiError(400, message, param="n", code="too_many_completions")
        if self.num_unfinished + len(self._calls) + num > self.max_unfinished:
            message = f"the queue is full: {self.num_unfinished + len(self._calls)} of {self.max_unfinished} completions are unfinished; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})

    def check_open(self) -> None:
        """Raise if no more requests are accepted."""
        if self.failure is not None:
            raise ApiError(503, "the engine has failed, and the server is going down", code="engine_failed")
        if self._is_closed:
            raise _shutting_down()

    def submit(self, requests: Sequence[Request], wants_tokens: bool) -> Generation:
        """Submit requests. With `wants_tokens` there is an event for every token, not only for completions."""
        self.check_room(len(requests))
        generation = Generation(self, requests, wants_tokens)
        self.num_unfinished += len(requests)
        self._open.add(generation)
        self._send(lambda: self._submit(generation))
        return generation

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine's thread between two steps, so that it may use the engine's model; return its result.

        Calls count as unfinished requests, but are never refused: each belongs to a request that was accepted.
        """
        self.check_open()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: Exception | None) -> None:
            if future.done():  # the client disconnected, or the server shuts down
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
            except Exception as raised:  # noqa: BLE001 (raised by the caller; the engine was not used)
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
        """Abort the unfinished requests of a generation."""
        self._send(lambda: self._abort(generation))

    def _send(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self.engine.interrupt()  # after the put, so that the engine's thread finds the action when `stream` returns

    def _deliver(self) -> None:
        self._is_woken = False  # before emptying: later entries wake the loop again
        while self._outbox:
            item = self._outbox.popleft()
            if isinstance(item, EngineFailure):
                for generation in list(self._open):
                    self._dispatch(generation, item)
                self._end_calls(item)
                self.on_failure()
            else:
                self._dispatch(*item)

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
            self._open.discard(generation)
        generation.put(event)

    # --- on the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_inbox()
            while not self._is_stopping:
                for completion in self.engine.stream():
                    self._end(completion)
                self._read_inbox()
        except Exception as error:  # noqa: BLE001 (all open generations get it, and the server ends)
            self.failure = EngineFailure(f"the engine failed: {type(error).__name__}: {error}")
            self.failure.__cause__ = error
            self._post(self.failure)

    def _read_inbox(self) -> None:
        """Run the actions in the inbox; wait for one if no request runs."""
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
        except UserError as error:  # one of them can never run; none was accepted
            self._post((generation, error))
            return
        self._running.update({request.id: (generation, i) for i, request in enumerate(generation.requests)})

    def _abort(self, generation: Generation) -> None:
        ids = [request.id for request in generation.requests if request.id in self._running]
        # A request that is not returned could not be aborted, and ends by itself.
        for completion in self.engine.abort(ids, keep=True) if ids else []:
            self._end(completion)

    def _on_token(self, request_id: str, token: int) -> None:
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
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and all requests have ended
                self._event_loop.call_soon_threadsafe(self._deliver)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
