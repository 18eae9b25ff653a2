"""A pool of worker processes that host environments and tools, for the event loop of the runner.

    workers = ObjectWorkers(num_workers=4)
    game = await workers.open(ObjectSpec("my_env.py:Game", {"size": 6}, base=folder))
    observation = await game.call("start", episode, deadline_s=30)
    await game.close()

Objects are spread over the processes by the number that each has open. The rules of failure:

- A method that raises, returns garbage or passes its deadline fails its own call. Other objects of the process are not affected.
- A process that ends fails all its calls as `died`, and is replaced. If a method blocked it, that call is `timed_out`.
- After a death, processes take fewer objects at once, so that an object that kills its process takes fewer others with it. Objects that
  close without a further death raise the number again.
- A process with many threads that were left behind by deadlines gets no more objects, and ends with its last one. Another replaces it.
- A `UserError` (a wrong path, a wrong option, or one that the object raises) is passed on, and ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from burnish.config.errors import UserError
from burnish.environments.wire import CallFailed, FailureKind, UnsendableValue, decode_value, encode_value
from burnish.environments.worker_link import Link, WorkerGone, WorkerLimits, start_worker
from burnish.environments.worker_output import OnOutput, WorkerLog

__all__ = ["CallFailed", "ObjectSpec", "ObjectWorkers", "RemoteObject", "WorkerLimits"]

T = TypeVar("T")

MAX_FAILED_STARTS = 3
MAX_ABANDONED = 8
"""A worker with more threads left behind gets no new objects."""
MAX_IDLE = 1024
"""Reusable objects that wait for another episode, in the whole pool."""
DEADLINE_S = 30.0
OPEN_DEADLINE_S = 120.0
"""Generous, because a constructor may import large modules and read files."""
CLOSE_DEADLINE_S = 10.0
ROOM_WAIT_S = 30.0
"""How long `open` waits for a process that may take another object, after processes have died."""
NUM_QUIET_CLOSES = 64
"""Objects that close without a death before processes take twice as many again."""
MAX_OBJECTS = 4096
"""A limit above this is none."""
MAX_REQUEST_BYTES = 256 << 20


@dataclass(frozen=True)
class ObjectSpec:
    """How to build an object: a class, and the options of its constructor."""

    path: str
    """`package.module:Class`, or `path/file.py:Class` relative to `base`."""
    options: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    """The folder of relative paths. A class that takes `base`, as adapters do, gets it as an option."""

    @cached_property
    def key(self) -> str:
        """A text that is equal for equal specs."""
        return json.dumps([self.path, self.options, self.base], sort_keys=True)


class _Worker:
    """One place of the pool: a process that starts, runs or drains."""

    def __init__(self, number: int, starting: Coroutine[Any, Any, Link]) -> None:
        self.number = number
        self.starting = asyncio.create_task(starting)
        self.open_objects: set[RemoteObject] = set()
        self.num_opening = 0
        self.abandoned = 0
        """Threads and tasks in it that run on after their deadline."""
        self.total_abandoned = 0
        self.is_draining = False
        self.num_at_end = 0
        """Objects that were in it when it ended; 0 while it runs."""

    @property
    def load(self) -> int:
        return len(self.open_objects) + self.num_opening

    @property
    def is_running(self) -> bool:
        return self.starting.done() and self.starting.exception() is None and not self.starting.result().is_ending

    @property
    def can_take(self) -> bool:
        """Whether it is running or may be so soon."""
        return not self.starting.done() or self.is_running

    async def link(self) -> Link:
        """The process, once it is ready; `WorkerGone` if it could not start."""
        return await asyncio.shield(self.starting)


StartWorker = Callable[[int, WorkerLimits, OnOutput | None], Coroutine[Any, Any, Link]]
"""Starts a worker process, given its number, and passes its output on."""
COUNTERS = (
    "started",
    "restarts",
    "died",
    "blocked",
    "out_of_memory",
    "opened",
    "reused",
    "calls_timed_out",
    "calls_died",
    "abandoned_threads",
)


@dataclass(frozen=True)
class _IdleObject:
    """A closed object that can be started again."""

    worker: _Worker
    number: int


class RemoteObject:
    """An object in a worker process. `ObjectWorkers.open` makes it."""

    def __init__(self, pool: ObjectWorkers, worker: _Worker, number: int, spec: ObjectSpec, is_reusable: bool) -> None:
        self.spec = spec
        self._pool = pool
        self._worker = worker
        self._number = number
        self._is_reusable = is_reusable
        self._is_closed = False

    async def call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Call a method and return what it returns, or read an attribute. Without a deadline, that of the pool holds.

        Raises `CallFailed`, or the `UserError` that the method raised. A cancelled caller gets no result; the method runs on until it
        returns or its deadline passes.
        """
        if self._is_closed:
            raise RuntimeError(f"{self.spec.path}: {method} is called after close")
        message: dict[str, Any] = {"do": "call", "object": self._number, "method": method}
        try:
            message["arguments"] = [
                encode_value(a, f"argument {k} of {method}", MAX_REQUEST_BYTES) for k, a in enumerate(arguments)
            ]
        except UnsendableValue as error:
            raise TypeError(f"{self.spec.path}: {error}") from error
        try:
            value = await self._pool._request(self._worker, message, deadline_s or self._pool.deadline_s)
        except BaseException:
            self._is_reusable = False  # its state is unknown, and a thread may still be using it
            raise
        try:
            return decode_value(value)
        except (LookupError, TypeError) as error:  # only user code that writes to the socket can cause it
            raise CallFailed("bad_reply", f"{self.spec.path}: {method}: {error}") from error

    async def interrupt(self) -> None:
        """End the calls of the object under way, as if their deadline had passed: they raise `CallFailed` with the kind `timed_out`."""
        if not self._is_closed:
            message = {"do": "interrupt", "object": self._number}
            await self._pool._request(self._worker, message, CLOSE_DEADLINE_S)

    async def close(self) -> None:
        """Call the object's own `close` and free it. A second call does nothing, and so does one after the worker's death.

        Raises `CallFailed` if the object's own `close` failed; the object is freed then too.
        """
        if not self._is_closed:
            self._is_closed = True
            pool = self._pool  # a cancelled caller must not leave an object behind
            await asyncio.shield(pool._task(pool._close(self, self._worker, self._number, self._is_reusable)))


class ObjectWorkers:
    """Worker processes that host objects. All methods must be called in one event loop. The processes start with the first `open`."""

    def __init__(
        self,
        num_workers: int,
        limits: WorkerLimits | None = None,
        *,
        start: StartWorker = start_worker,
        deadline_s: float = DEADLINE_S,
        open_deadline_s: float = OPEN_DEADLINE_S,
        max_abandoned: int = MAX_ABANDONED,
        max_idle: int = MAX_IDLE,
    ) -> None:
        self.num_workers = num_workers
        self.limits = limits or WorkerLimits()
        self._start = start
        self.deadline_s = deadline_s
        self.open_deadline_s = open_deadline_s
        self.max_abandoned = max_abandoned
        self.max_idle = max_idle
        self.log: WorkerLog | None = None
        """Where the output and the failures of the processes go; set it before the first `open`."""
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._workers: list[_Worker] = []
        self._draining: set[_Worker] = set()
        self._idle: dict[str, list[_IdleObject]] = defaultdict(list)
        self._num_idle = 0
        self._numbers = itertools.count()
        self._worker_numbers = itertools.count()
        self._max_objects: int | None = None
        """Objects that a process may have at once; None for any number."""
        self._num_quiet_closes = 0
        self._room = asyncio.Event()
        self._failed_starts = 0
        self._fatal: UserError | None = None
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._following: set[asyncio.Task[None]] = set()

    def counters(self) -> dict[str, int]:
        """Counts since the start: processes, objects, failed calls, and threads that run on after their deadline.

        Of the processes that the pool did not end itself, some `died`, some were `blocked` and killed, some ran `out_of_memory`.
        """
        return dict(self._counters)

    async def open(self, spec: ObjectSpec, *, is_reusable: bool = False) -> RemoteObject:
        """Build an object, or take a closed one of the same spec with `is_reusable`.

        Raises `CallFailed` if the constructor fails, and `UserError` if the class cannot be loaded or no worker can start.
        """
        idle = self._take_idle(spec) if is_reusable else None
        if idle is not None:
            self._counters["reused"] += 1
            reused = RemoteObject(self, idle.worker, idle.number, spec, is_reusable)
            idle.worker.open_objects.add(reused)
            return reused
        try:
            options = encode_value(spec.options, "options", MAX_REQUEST_BYTES)
        except UnsendableValue as error:
            raise UserError(f"{spec.path}: {error}") from error
        opening = self._task(self._build(spec, options, is_reusable))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_unused)
            raise

    async def _build(self, spec: ObjectSpec, options: Any, is_reusable: bool) -> RemoteObject:
        worker = await self._ready_worker()
        try:
            number = next(self._numbers)
            message = {"do": "open", "object": number, "path": spec.path, "options": options, "base": spec.base}
            await self._request(worker, message, self.open_deadline_s)
            opened = RemoteObject(self, worker, number, spec, is_reusable)
            worker.open_objects.add(opened)
        finally:
            worker.num_opening -= 1
            self._drain_if_needed(worker)
        self._counters["opened"] += 1
        return opened

    def _close_unused(self, opening: asyncio.Task[RemoteObject]) -> None:
        """Close an object whose `open` was cancelled meanwhile."""
        if not opening.cancelled() and opening.exception() is None:
            self._task(opening.result().close()).add_done_callback(lambda closing: closing.exception())

    async def aclose(self) -> None:
        """Close the objects that are open, for a few seconds, and end all processes."""
        self._is_closed = True
        workers = [*self._workers, *self._draining]
        closing = [asyncio.ensure_future(remote.close()) for worker in workers for remote in worker.open_objects]
        if closing:
            done, left = await asyncio.wait(closing, timeout=CLOSE_DEADLINE_S)
            for task in done:
                task.exception()  # what fails now concerns no episode
            for task in left:
                task.cancel()
        for worker in workers:
            with contextlib.suppress(WorkerGone):
                link = await worker.link()
                link.kill("was ended with the pool")
                await link.gone
        await asyncio.gather(*self._following)
        self._workers, self._draining = [], set()

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something to its end, even if nothing waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- processes -----------------------------------------------------------------------------------------------------

    async def _ready_worker(self) -> _Worker:
        """The process with the fewest objects, with one more counted as opening."""
        is_late, until = False, time.monotonic() + ROOM_WAIT_S
        while True:
            if self._is_closed:
                raise RuntimeError("the pool of environment workers is closed")
            if self._fatal is not None:
                raise self._fatal
            while len(self._workers) < self.num_workers:
                self._add_worker()
            worker = min(self._workers, key=lambda w: (not w.can_take, w.load))
            if self._max_objects is not None and worker.load >= self._max_objects and not is_late:
                is_late = not await self._wait_for_room(until)
                continue
            worker.num_opening += 1
            try:
                link = await worker.link()
                if not link.is_ending:
                    return worker
                await asyncio.shield(link.gone)
                raise WorkerGone("it ended before it was used")
            except BaseException as error:
                worker.num_opening -= 1
                if not isinstance(error, WorkerGone):
                    raise
                await asyncio.sleep(0)  # `_follow` replaces it, or sets the error that ends the run

    async def _wait_for_room(self, until: float) -> bool:
        """Wait until an object closes or a process is replaced; False if that took too long."""
        self._room.clear()
        try:
            await asyncio.wait_for(self._room.wait(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            return False
        return True

    def _after_death(self, worker: _Worker) -> None:
        """Let processes take half as many objects at once as the one that died had."""
        worker.num_at_end = worker.num_at_end or worker.load
        if worker.num_at_end > 1 and not worker.is_draining and not self._is_closed:
            self._max_objects = max(1, min(worker.num_at_end, self._max_objects or worker.num_at_end) // 2)
            self._num_quiet_closes = 0
        self._room.set()

    def _after_close(self, worker: _Worker) -> None:
        self._room.set()
        self._num_quiet_closes += worker.is_running  # objects of a process that died do not count
        if self._max_objects is not None and self._num_quiet_closes >= NUM_QUIET_CLOSES:
            self._num_quiet_closes = 0
            self._max_objects = 2 * self._max_objects if 2 * self._max_objects <= MAX_OBJECTS else None

    def _add_worker(self) -> None:
        number, log = next(self._worker_numbers), self.log
        on_output = None if log is None else functools.partial(log.write, number)
        worker = _Worker(number, self._start(number, self.limits, on_output))
        self._workers.append(worker)
        self._following.add(task := self._task(self._follow(worker)))
        task.add_done_callback(self._following.discard)

    async def _follow(self, worker: _Worker) -> None:
        """Wait for the start and the end of a process, and replace it."""
        try:
            link = await worker.link()
        except WorkerGone as error:
            self._failed_starts += 1
            self._log(worker, str(error))
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._fatal = UserError(
                    f"{MAX_FAILED_STARTS} worker processes for environments in a row ended before they were ready: {error}. If they ran out "
                    f"of memory, raise environment.memory_gib (now {self.limits.memory_gib:g}) or lower environment.workers "
                    f"(now {self.num_workers})"
                )
        else:
            self._failed_starts = 0
            self._counters["started"] += 1
            end = await asyncio.shield(link.gone)
            if end.cause != "ended":
                self._counters[end.cause] += 1
                self._log(worker, end.text)
            self._after_death(worker)
        self._draining.discard(worker)
        self._forget_idle(worker)
        if worker in self._workers:
            self._workers.remove(worker)
        if not self._is_closed and self._fatal is None:
            self._counters["restarts"] += 1
            while len(self._workers) < self.num_workers:
                self._add_worker()

    def _drain_if_needed(self, worker: _Worker) -> None:
        """Give a worker with many threads left behind no more objects, and end it when it has none."""
        if worker.abandoned > self.max_abandoned and not worker.is_draining:
            worker.is_draining = True
            self._forget_idle(worker)
            if worker in self._workers:
                self._workers.remove(worker)
                self._draining.add(worker)
                if not self._is_closed:
                    self._add_worker()
        if worker.is_draining and worker.load == 0 and worker.is_running:
            worker.starting.result().kill("was ended because of the threads left behind in it")

    def _log(self, worker: _Worker, text: str) -> None:
        """Write down how a process ended or a call failed."""
        if self.log is not None:
            self.log.write(worker.number, text.encode(errors="replace").splitlines())

    # --- objects -------------------------------------------------------------------------------------------------------

    async def _request(self, worker: _Worker, message: dict[str, Any], deadline_s: float) -> Any:
        """Send a request to a worker and return the value of its reply, or raise how it failed."""
        try:
            link = await worker.link()
            reply = await link.request({**message, "deadline_s": deadline_s})
        except WorkerGone as gone:
            kind: FailureKind = "timed_out" if gone.is_to_blame else "died"
            self._counters[f"calls_{kind}"] += 1
            worker.num_at_end = worker.num_at_end or worker.load
            raise CallFailed(kind, str(gone), has_neighbours=kind == "died" and worker.num_at_end > 1) from gone
        if "user_error" in reply:
            raise UserError(reply["user_error"])
        if "failed" not in reply:
            return reply["value"]
        worker.abandoned = reply["abandoned"]
        self._counters["abandoned_threads"] += reply["total_abandoned"] - worker.total_abandoned
        worker.total_abandoned = reply["total_abandoned"]
        if reply["failed"] == "timed_out":
            self._counters["calls_timed_out"] += 1
            self._drain_if_needed(worker)
        self._log(worker, f"{reply['failed']}: {reply['message']}\n{reply['traceback']}")
        raise CallFailed(reply["failed"], reply["message"], reply["traceback"])

    async def _close(self, remote: RemoteObject, worker: _Worker, number: int, is_reusable: bool) -> None:
        is_kept = is_reusable and not worker.is_draining and self._num_idle < self.max_idle and not self._is_closed
        message = {"do": "close", "object": number, "is_kept": is_kept}
        try:
            if worker.is_running:
                await self._request(worker, message, min(CLOSE_DEADLINE_S, self.deadline_s))
                if is_kept and not worker.is_draining:
                    self._idle[remote.spec.key].append(_IdleObject(worker, number))
                    self._num_idle += 1
        except CallFailed as failed:
            if failed.kind != "died":
                raise
            self._counters["calls_died"] -= 1  # nothing was left to free, so no call has failed
        finally:
            worker.open_objects.discard(remote)
            self._after_close(worker)
            self._drain_if_needed(worker)

    def _take_idle(self, spec: ObjectSpec) -> _IdleObject | None:
        waiting = self._idle.get(spec.key, [])
        while waiting:
            self._num_idle -= 1
            idle = waiting.pop()
            if idle.worker.is_running:
                return idle
        return None

    def _forget_idle(self, worker: _Worker) -> None:
        """Take no object of a worker any more that ends."""
        for key, waiting in list(self._idle.items()):
            left = [idle for idle in waiting if idle.worker is not worker]
            self._num_idle -= len(waiting) - len(left)
            self._idle[key] = left
            if not left:
                del self._idle[key]
