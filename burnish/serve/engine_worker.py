"""The engine's side of the server: one thread that uses the engine, with an inbox and an outbox.

`EngineThread` runs it in a thread of this process. `engine_process` runs it in a process of its own, so that HTTP and the engine do not wait
for the same interpreter: a launch of CUDA graphs needs Python's lock many times, and waits for it each time while a request is parsed.
Either way the two sides exchange the messages below. One wake-up delivers all entries that have come until then.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Engine, Request
from burnish.serve.request_to_engine import Scorer

Listener = Callable[[str, int], None]
MAX_STEP_S = 30


class EngineFailure(RuntimeError):
    """The engine raised an unexpected error."""


# --- messages to the engine -----------------------------------------------------------------------------------------------


class Submit(NamedTuple):
    """Requests that are submitted together. With `wants_tokens` their tokens are posted as they are drawn."""

    generation: int
    requests: Sequence[Request]
    wants_tokens: bool


class Abort(NamedTuple):
    """Ends the unfinished requests of a generation."""

    generation: int


class Call(NamedTuple):
    """Runs a function between two steps."""

    number: int
    work: Callable[[], Any]


class CancelCall(NamedTuple):
    """The result of a call is no longer wanted."""

    number: int


class Stop(NamedTuple):
    """Ends the thread."""


ToEngine = Submit | Abort | Call | CancelCall | Stop

# --- messages from the engine ---------------------------------------------------------------------------------------------


class Posted(NamedTuple):
    """New tokens of a request, its completion, or the error for which the engine refused the generation."""

    generation: int
    request_index: int
    """Index of the request in its generation."""
    payload: list[int] | Completion | UserError


class CallResult(NamedTuple):
    """What a call returned or raised."""

    number: int
    result: Any
    error: Exception | None


FromEngine = Posted | CallResult | EngineFailure


@dataclass(eq=False)
class _TokenSink:
    """The tokens of a streaming request that the reader has not taken yet."""

    generation: int
    index: int
    tokens: deque[int]
    is_posted: bool = False

    def take(self) -> Posted:
        self.is_posted = False  # before emptying: later tokens post it again
        return Posted(self.generation, self.index, [self.tokens.popleft() for _ in range(len(self.tokens))])


class EngineWorker:
    """Uses the engine on the thread that calls `run`. `send` and `take` may be called from other threads.

    `wake` is called when the outbox is no longer empty; the reader must then call `take`. An engine that raises anything but a `UserError` is
    not used again, since its state is unknown: the failure is posted, and `run` returns.
    """

    def __init__(self, make_engine: Callable[[Listener], Engine]) -> None:
        self.engine = make_engine(self._on_token)
        self.wake: Callable[[], None] = lambda: None
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: deque[_TokenSink | FromEngine] = deque()
        self._is_woken = False
        self._is_stopping = False
        self._running: dict[str, tuple[int, int]] = {}  # generation and index, by request id
        self._generations: dict[int, dict[str, None]] = {}  # ids of unfinished requests
        self._sinks: dict[str, _TokenSink] = {}
        self._cancelled: deque[int] = deque()  # calls, written by `send`
        self._cancelled_calls: set[int] = set()  # those of them that may still come

    @property
    def num_waiting(self) -> int:
        """Requests in the engine's waiting queue."""
        waiting: Sized = getattr(self.engine, "waiting", ())  # engines without a queue start every request at once
        return len(waiting)

    # --- for other threads -----------------------------------------------------------------------------------------------

    def send(self, message: ToEngine) -> None:
        """Give a message to the engine's thread, which reads it within one step."""
        if isinstance(message, CancelCall):
            self._cancelled.append(message.number)
            return
        self._inbox.put(message)
        self.engine.interrupt()  # after the put, so that the engine's thread finds the message when `stream` returns

    def take(self) -> list[FromEngine]:
        """All entries of the outbox."""
        self._is_woken = False  # before emptying: later entries wake the reader again
        found: list[FromEngine] = []
        while self._outbox:
            item = self._outbox.popleft()
            found.append(item.take() if isinstance(item, _TokenSink) else item)
        return found

    # --- on the engine's thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a `Stop` message or a failure."""
        try:
            self._read_inbox()
            while not self._is_stopping:
                for completion in self.engine.stream():
                    self._end(completion)
                self._read_inbox()
        except Exception as error:  # noqa: BLE001 (all open generations get it, and the server ends)
            failure = EngineFailure(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._post(failure)

    def _read_inbox(self) -> None:
        """Handle the messages in the inbox; wait for one if no request runs."""
        while not self._is_stopping:
            try:
                message = self._inbox.get(block=not self._running)
            except queue.Empty:
                return
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                self._abort(message.generation)
            elif isinstance(message, Call):
                self._call(message)
            else:
                self._is_stopping = True
                self.engine.abort(list(self._running), keep=False)
                for requests in (self._running, self._generations, self._sinks):
                    requests.clear()

    def _submit(self, message: Submit) -> None:
        try:
            self.engine.submit(message.requests)
        except UserError as error:  # one of them can never run; none was accepted
            self._post(Posted(message.generation, 0, error))
            return
        self._generations[message.generation] = dict.fromkeys(request.id for request in message.requests)
        for i, request in enumerate(message.requests):
            self._running[request.id] = message.generation, i
            if message.wants_tokens:
                self._sinks[request.id] = _TokenSink(message.generation, i, deque())

    def _abort(self, generation: int) -> None:
        ids = list(self._generations.get(generation, ()))
        # A request that is not returned could not be aborted, and ends by itself.
        for completion in self.engine.abort(ids, keep=True) if ids else []:
            self._end(completion)

    def _call(self, message: Call) -> None:
        while self._cancelled:
            self._cancelled_calls.add(self._cancelled.popleft())
        is_cancelled = message.number in self._cancelled_calls
        self._cancelled_calls = {number for number in self._cancelled_calls if number > message.number}
        if is_cancelled:
            return
        result, raised = None, None
        try:
            result = message.work()
        except Exception as error:  # noqa: BLE001 (raised by the caller; the engine was not used)
            raised = error
        self._post(CallResult(message.number, result, raised))

    def _on_token(self, request_id: str, token: int) -> None:
        sink = self._sinks.get(request_id)
        if sink is None:
            return
        sink.tokens.append(token)
        if not sink.is_posted:
            sink.is_posted = True
            self._post(sink)

    def _end(self, completion: Completion) -> None:
        generation, index = self._running.pop(completion.id)
        self._sinks.pop(completion.id, None)
        del self._generations[generation][completion.id]
        if not self._generations[generation]:
            del self._generations[generation]
        self._post(Posted(generation, index, completion))

    def _post(self, item: _TokenSink | FromEngine) -> None:
        self._outbox.append(item)
        if not self._is_woken:
            self._is_woken = True
            self.wake()


@dataclass
class LoadedEngine:
    """A model that is loaded: the factory of its engine, its scorer, and what a server must know of them."""

    make_engine: Callable[[Listener], Engine]
    scorer: Scorer
    describe: Callable[[Engine], Any]
    """Makes a picklable description of the model and the engine."""


class EngineThread:
    """An `EngineWorker` in a thread of this process."""

    def __init__(self, make_engine: Callable[[Listener], Engine]) -> None:
        self.worker = EngineWorker(make_engine)
        self._thread: threading.Thread | None = None

    @property
    def num_waiting(self) -> int:
        return self.worker.num_waiting

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread; `wake` is called on it when `take` has something."""
        self.worker.wake = wake
        self._thread = threading.Thread(target=self.worker.run, name="engine", daemon=True)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self.worker.send(message)

    def take(self) -> list[FromEngine]:
        return self.worker.take()

    def stop(self) -> None:
        """Drop unfinished requests and end the thread after its present step, waiting at most `MAX_STEP_S`."""
        if self._thread is not None:
            self.send(Stop())
            self._thread.join(MAX_STEP_S)
            self._thread = None
