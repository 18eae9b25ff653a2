"""Hosts the objects of many episodes in one process: builds them, runs their methods, and enforces deadlines.

An `async def` method runs as a task of the event loop. A plain method runs in a thread, so that it may block. A task past its deadline is
cancelled. A thread cannot be cancelled: it is left behind, and the call fails at once. Deadlines count from the moment a method begins, so
a call that waits for a free thread does not lose time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import queue
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.config.plugins import check_options, load_plugin
from burnish.environments.base import End, Environment, Observation
from burnish.environments.wire import (
    NO_REQUEST,
    CallFailed,
    FailureKind,
    UnsendableValue,
    decode_value,
    encode_value,
)

RETURNS: dict[str, tuple[type, ...]] = {"start": (Observation,), "step": (Observation, End), "end": (End,)}
"""What the methods of an `Environment` return."""
MAX_TRACEBACK_CHARS = 8_000
MAX_MESSAGE_CHARS = 2_000
THREAD_STACK_BYTES = 1 << 20
"""Stacks count as address space, which the memory limit caps. Python's own frames are not on them."""
CANCEL_WAIT_S = 0.1
"""How long a reply waits for a cancelled task to end, so that it does not count as left behind."""


@dataclass(frozen=True)
class Returned:
    """A method returned."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """A method raised."""

    error: BaseException


Outcome = Returned | Raised


class DeadlinePassed(Exception):
    """A method did not return in time."""


class _Thread:
    """A daemon thread that runs one function after another."""

    def __init__(self, number: int) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Outcome], None]]] = queue.SimpleQueue()
        self.is_abandoned = False
        threading.Thread(target=self._run, name=f"method-{number}", daemon=True).start()

    def _run(self) -> None:
        process = os.getpid()
        while True:
            function, report = self.jobs.get()
            outcome: Outcome
            try:
                outcome = Returned(function())
            except BaseException as error:  # noqa: BLE001 - even SystemExit is the failure of one call only
                outcome = Raised(error)
            if os.getpid() != process:  # a child that the method forked and that returned here has nothing to do
                os._exit(0)
            report(outcome)
            del function, report, outcome  # an idle thread keeps no object alive


class ThreadPool:
    """Threads that are made as they are needed, up to a limit of calls at once. Further calls wait in order.

    Threads that were left behind do not count towards the limit.
    """

    def __init__(self, max_threads: int) -> None:
        self._slots = asyncio.Semaphore(max_threads)  # first come, first served
        self._idle: list[_Thread] = []
        self._num_started = 0
        self.num_abandoned = 0
        """Threads that are running on after their deadline."""
        self.total_abandoned = 0

    async def run(
        self, function: Callable[[], Any], deadline_s: float | None, interrupted: asyncio.Future[None]
    ) -> Outcome:
        """Run a function in a thread; `DeadlinePassed` if it takes longer or is interrupted, while the thread runs on."""
        async with self._slots:
            thread = self._idle.pop() if self._idle else self._start()
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Outcome] = loop.create_future()

            def end(outcome: Outcome) -> None:
                if thread.is_abandoned:
                    thread.is_abandoned = False
                    self.num_abandoned -= 1
                self._idle.append(thread)
                if not future.done():
                    future.set_result(outcome)

            def report(outcome: Outcome) -> None:
                loop.call_soon_threadsafe(end, outcome)

            thread.jobs.put((function, report))
            either: list[asyncio.Future[Any]] = [future, interrupted]
            await asyncio.wait(either, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                thread.is_abandoned = True
                self.num_abandoned += 1
                self.total_abandoned += 1
                raise DeadlinePassed
            return future.result()

    def _start(self) -> _Thread:
        self._num_started += 1
        return _Thread(self._num_started)


class ObjectHost:
    """The objects of a worker process, by number. `answer` takes a request and returns the reply; it never raises.

    `mark` is called with the id of a request whenever the event loop begins to run its method, and with `NO_REQUEST` when it stops.
    """

    def __init__(self, max_threads: int, max_reply_bytes: int, mark: Callable[[int], None]) -> None:
        threading.stack_size(THREAD_STACK_BYTES)
        self._threads = ThreadPool(max_threads)
        self._abandoned_tasks: set[asyncio.Task[Any]] = set()
        self._max_reply_bytes = max_reply_bytes
        self._mark = mark
        self._factories: dict[tuple[str, str | None, frozenset[str]], Callable[..., Any]] = {}
        self._objects: dict[int, Any] = {}
        self._interrupts: dict[int, asyncio.Future[None]] = {}
        """By object: done when its calls are to end before their deadline."""

    @property
    def num_abandoned(self) -> int:
        """Threads and tasks that run on after their deadline."""
        return self._threads.num_abandoned + len(self._abandoned_tasks)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for. The reply has its value, or how it failed."""
        what = request["do"]
        try:
            if what == "call":
                return {"value": await self._call(request)}
            if what == "open":
                await self._open(request)
            elif what == "interrupt":
                self._interrupt(request["object"])
            elif what == "close":
                await self._close(request)
            else:
                raise ValueError(f"unknown request {what!r}")
            return {"value": None}
        except UserError as error:
            return {"user_error": f"{error}{_memory_hint(str(error))}"}
        except CallFailed as failed:
            return self._failed_reply(failed)
        except Exception as error:  # noqa: BLE001 - a request without a reply would wait for ever
            return self.failed_reply(what, error)

    def failed_reply(self, name: str, error: Exception, kind: FailureKind = "raised") -> dict[str, Any]:
        """The reply to a request that failed outside of the user's methods."""
        return self._failed_reply(_failure(name, error, kind))

    def _failed_reply(self, failed: CallFailed) -> dict[str, Any]:
        reply = {"failed": failed.kind, "message": failed.message, "traceback": failed.traceback}
        return reply | {"abandoned": self.num_abandoned, "total_abandoned": self._threads.total_abandoned}

    async def _open(self, request: dict[str, Any]) -> None:
        path, base = request["path"], request["base"]
        options = decode_value(request["options"])
        checked = (path, base, frozenset(options))

        def build() -> Any:
            if checked not in self._factories:  # reading a signature takes longer than building a small object
                factory = load_plugin(path, base)
                check_options(factory, options, path)
                takes_base = base is not None and "base" not in options and _takes_base(factory)
                self._factories[checked] = functools.partial(factory, base=base) if takes_base else factory
            return self._factories[checked](**options)

        name = path.rpartition(":")[2]
        self._objects[request["object"]] = await self._run(build, f"{name}()", request)

    def _interrupt(self, number: int) -> None:
        """End the calls of an object under way, as if their deadline had passed."""
        if (interrupted := self._interrupts.pop(number, None)) is not None and not interrupted.done():
            interrupted.set_result(None)

    async def _call(self, request: dict[str, Any]) -> Any:
        if (target := self._objects.get(request["object"])) is None:
            raise CallFailed("raised", f"{request['method']} was called after the object was closed")
        method, arguments = request["method"], [decode_value(argument) for argument in request["arguments"]]
        name = f"{type(target).__name__}.{method}"
        found = getattr(target, method, None)
        if found is None:
            raise CallFailed("raised", f"{type(target).__name__} has no method {method!r}")
        value = found
        if callable(found):
            value = await self._run(found, name, request, *arguments)
            self._check_kind(target, method, value)
        try:
            return encode_value(value, f"what {name} returned", self._max_reply_bytes)
        except UnsendableValue as error:
            raise CallFailed("bad_reply", str(error)) from error
        except Exception as error:  # the value's own code may raise anything
            raise _failure(f"what {name} returned cannot be read", error, "bad_reply") from error

    def _check_kind(self, target: Any, method: str, value: Any) -> None:
        """Refuse what is not of the record that the method of an environment must return."""
        expected = RETURNS.get(method) if isinstance(target, Environment) else None
        if expected is not None and not isinstance(value, expected):
            wanted = " or ".join(kind.__name__ for kind in expected)
            found = f"{type(target).__name__}.{method} returned {type(value).__name__}"
            raise CallFailed("bad_reply", f"{found}; it must return {wanted} (burnish.environments.base)")

    async def _close(self, request: dict[str, Any]) -> None:
        """Call the object's own `close`, and forget the object unless it `is_kept` and could be closed."""
        number = request["object"]
        self._interrupts.pop(number, None)
        target = self._objects.pop(number)
        if callable(close := getattr(target, "close", None)):
            await self._run(close, f"{type(target).__name__}.close", request)
        if request["is_kept"]:
            self._objects[number] = target

    async def _run(self, function: Callable[..., Any], name: str, request: dict[str, Any], *arguments: Any) -> Any:
        """Run a function of the user; `CallFailed` if it raises or takes too long."""
        deadline_s: float = request["deadline_s"]
        interrupted = self._interrupts.setdefault(request["object"], asyncio.get_running_loop().create_future())
        try:
            if inspect.iscoroutinefunction(function):
                outcome = await self._run_task(function(*arguments), request, interrupted)
            else:
                outcome = await self._threads.run(lambda: function(*arguments), deadline_s, interrupted)
                if isinstance(outcome, Returned) and inspect.isawaitable(outcome.value):
                    outcome = await self._run_task(_awaited(outcome.value), request, interrupted)
        except DeadlinePassed:
            why = "was interrupted" if interrupted.done() else f"did not return in {deadline_s:g} s"
            raise CallFailed("timed_out", f"{name} {why}") from None
        except Exception as error:  # such as wrong arguments, or no memory for a thread
            raise _failure(name, error) from error
        if isinstance(outcome, Returned):
            return outcome.value
        if isinstance(outcome.error, UserError):
            raise outcome.error
        raise _failure(name, outcome.error) from outcome.error

    async def _run_task(
        self, coroutine: Coroutine[Any, Any, Any], request: dict[str, Any], interrupted: asyncio.Future[None]
    ) -> Outcome:
        task = asyncio.create_task(_outcome(self._marked(coroutine, request["id"]), os.getpid()))
        either: list[asyncio.Future[Any]] = [task, interrupted]
        await asyncio.wait(either, timeout=request["deadline_s"], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._abandoned_tasks.add(task)
            task.add_done_callback(self._abandoned_tasks.discard)
            await asyncio.wait([task], timeout=CANCEL_WAIT_S)
            raise DeadlinePassed
        return Raised(asyncio.CancelledError("the method was cancelled")) if task.cancelled() else task.result()

    @types.coroutine
    def _marked(self, coroutine: Coroutine[Any, Any, Any], request: int) -> Generator[Any, Any, Any]:
        """Run a coroutine, and mark its request while it runs, so that a method that blocks the event loop is known."""
        resume: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731
        while True:
            self._mark(request)
            try:
                awaited = resume()
            except StopIteration as end:
                return end.value
            finally:
                self._mark(NO_REQUEST)
            try:
                sent = yield awaited
                resume = functools.partial(coroutine.send, sent)
            except BaseException as error:  # noqa: BLE001 - a cancellation, which the method gets
                resume = functools.partial(coroutine.throw, error)


async def _outcome(coroutine: Awaitable[Any], process: int) -> Outcome:
    """Run a coroutine. SystemExit must not leave the task: it would end the event loop."""
    try:
        return Returned(await coroutine)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - even SystemExit is the failure of one call only
        return Raised(error)
    finally:
        if os.getpid() != process:  # a child that the method forked
            os._exit(0)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _takes_base(factory: Any) -> bool:
    """Whether a class takes `base`, the folder of relative paths, as adapters do that load another class."""
    try:
        return "base" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _memory_hint(text: str) -> str:
    """What to do about an error that comes from the memory limit; a library that does not fit raises an ImportError."""
    signs = ("MemoryError", "failed to map segment", "annot allocate memory", "can't start new thread")
    if not any(sign in text for sign in signs):
        return ""
    return "; environment.memory_gib limits the address space of a worker process with all its episodes: raise it"


def _failure(name: str, error: BaseException, kind: FailureKind = "raised") -> CallFailed:
    """What a method raised, with its traceback from the first frame outside of this file."""
    trace: types.TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        text = f"{type(error).__name__}: {error}"
        frames = "".join(traceback.format_exception(type(error), error, trace))
    except Exception as second:  # noqa: BLE001 - an exception whose own text cannot be made
        text, frames = f"{type(error).__name__} (its text raises {type(second).__name__})", ""
    text += _memory_hint(text)
    return CallFailed(kind, f"{name}: {text}"[:MAX_MESSAGE_CHARS], frames[-MAX_TRACEBACK_CHARS:])
