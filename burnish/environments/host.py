"""`EnvironmentHost` runs the calls of environments for the runner: at once, in an event loop, or in worker processes.

A call that runs at once returns its reply. Any other call returns None, and its reply arrives in a queue, so that the engine never waits
for an environment. Every call that can wait has a deadline. Everything that fails becomes an `EpisodeFailed` with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from burnish.config.errors import UserError
from burnish.environments.base import (
    AgentProgram,
    AgentTask,
    Answer,
    End,
    Environment,
    Episode,
    EpisodeFailed,
    Observation,
    RunsIn,
)
from burnish.environments.worker_output import WorkerLog
from burnish.environments.workers import CallFailed, ObjectSpec, ObjectWorkers, RemoteObject

logger = logging.getLogger(__name__)

Reply = Observation | End | EpisodeFailed | UserError
"""What a call returns. A `UserError` ends the run; the runner raises it in its own thread."""
T = TypeVar("T")
NO_DEADLINE_S = 1e9
"""For an agent's `play`: `deadline_s` limits the time between two of its model calls, and the runner interrupts it."""
SESSIONS_TIMEOUT_S = 10.0
"""How long the host waits, when it closes, for sessions that are being closed."""
CLOSE_TIMEOUT_S = 40.0
"""How long the host waits for environments and workers to close. Objects and processes have limits of their own, 10 s each."""
MAX_TRACEBACK_CHARS = 8_000
FAILURE_KINDS = {
    "raised": "step_failed",
    "timed_out": "step_timed_out",
    "died": "worker_died",
    "bad_reply": "bad_reply",
}
"""The kind of event for each kind of failed call after the start of an episode."""


class MakeWorkers(Protocol):
    """Starts the worker processes. Called once, inside the event loop, before the first environment is opened there."""

    def __call__(self) -> ObjectWorkers: ...


@dataclass(frozen=True)
class EnvironmentKind:
    """A configured environment: its class and where it runs."""

    name: str
    runs_in: RunsIn
    make: Callable[[], Environment | AgentProgram] | None = None
    """Makes one object, for `runner` and `loop`."""
    make_with_workers: Callable[[Callable[[], Awaitable[ObjectWorkers]]], Environment] | None = None
    """Makes one object for `loop` that opens its tools in the worker processes."""
    aclose: Callable[[], Awaitable[None]] | None = None
    """Frees what all its objects share, in the event loop, when the host closes."""
    spec: ObjectSpec | None = None
    """What a worker process makes, for `worker`."""
    is_reusable: bool = False
    takes_truncated: bool = False
    roles: tuple[str, ...] = ()
    correct_at: float | None = None
    tells_void_turns: bool = False
    deadline_s: float = 60.0
    """Time limit of one call."""
    has_own_deadlines: bool = False
    """Whether the environment bounds its own waits."""
    is_agent: bool = False
    """Whether it is an `AgentProgram`, which calls the model itself. `deadline_s` then limits the time between two of its calls."""
    max_open: int | None = None
    """Only for agents: programs that run at once. Further episodes wait; None for no limit."""


class HostReply(NamedTuple):
    """A reply with the ticket of its call."""

    ticket: Any
    reply: Reply


class Session:
    """One episode of an environment. The host runs its coroutines one at a time."""

    def __init__(self, kind: EnvironmentKind, host: EnvironmentHost) -> None:
        self.kind, self._host = kind, host
        self.lock = asyncio.Lock()
        """Held by a call under way, so that an episode that is dropped meanwhile closes only after it."""
        self._environment: Environment | AgentProgram | None = None
        self._remote: RemoteObject | None = None

    async def call(
        self,
        method: Literal["start", "step", "end", "play"],
        argument: Episode | Answer | AgentTask | str,
        on_open: Callable[[], None] | None = None,
    ) -> Observation | End:
        """Call a method of the environment, which the first call makes. `on_open` is called when it is made.

        Raises `EpisodeFailed`, or `UserError` to end the run.
        """
        kind = self.kind
        try:
            if kind.spec is not None:
                remote = await self._opened(kind.spec)
                if on_open is not None:
                    on_open()
                deadline_s = NO_DEADLINE_S if method == "play" else kind.deadline_s
                reply = await remote.call(method, argument, deadline_s=deadline_s)
            else:
                if self._environment is None:
                    self._environment = self._made()
                if on_open is not None:
                    on_open()
                work: Awaitable[Any] = getattr(self._environment, method)(argument)
                is_bounded = kind.runs_in == "runner" or kind.has_own_deadlines
                reply = await (work if is_bounded else asyncio.wait_for(work, kind.deadline_s))
        except (UserError, EpisodeFailed):
            raise
        except CallFailed as error:
            kind_of_event = (
                "reset_failed" if method == "start" and error.kind == "raised" else FAILURE_KINDS[error.kind]
            )
            text, log = f"{method}() failed: {error.message}", self._host.log
            if log is not None:
                text += f" (all output of environment workers: {log.path.name} of the run)"
            raise EpisodeFailed(kind_of_event, text, error.traceback, not error.has_neighbours) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the host closes
                raise
            # Something that the environment waited for was cancelled. Without a reply the episode would wait for ever.
            raise EpisodeFailed("step_failed", f"{method}() was cancelled") from error
        except TimeoutError as error:
            # An environment's own waits may raise it too, with a text of their own.
            why = f": {error}" if str(error) else f" after {kind.deadline_s:g} s"
            raise EpisodeFailed("step_timed_out", f"{method}() timed out{why}") from error
        except Exception as error:  # an environment may raise anything; the sample fails with the reason
            text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
            failed = "reset_failed" if method == "start" else "step_failed"
            raise EpisodeFailed(failed, f"{method}() raised {type(error).__name__}: {error}", text) from error
        return checked_roles(checked_reply(reply, method), method, kind.roles)

    async def _opened(self, spec: ObjectSpec) -> RemoteObject:
        if self._remote is None:
            workers = await self._host.workers()
            self._remote = await workers.open(spec, is_reusable=self.kind.is_reusable)
        return self._remote

    def _made(self) -> Environment | AgentProgram:
        if self.kind.make_with_workers is not None:
            return self.kind.make_with_workers(self._host.workers)
        assert self.kind.make is not None, "an environment outside of workers has a factory"
        return self.kind.make()

    async def interrupt(self) -> None:
        """End the call under way: it fails as if its deadline had passed."""
        if isinstance(self._environment, AgentProgram):
            await self._environment.interrupt()
        elif self._remote is not None:
            await self._remote.interrupt()

    async def close(self) -> None:
        """Close the environment. Errors do not matter any more: the episode has ended."""
        environment, remote = self._environment, self._remote
        self._environment = self._remote = None
        if environment is not None:
            await environment.close()
        if remote is not None:
            await remote.close()


def checked_reply(reply: Any, method: str) -> Observation | End:
    """Check what a method returned. Raises `EpisodeFailed` for anything that is not an observation or an end with the right contents."""
    if method in ("end", "play") and not isinstance(reply, End):
        raise EpisodeFailed("bad_reply", f"{method}() returned {type(reply).__name__}; expected End")
    if method == "start" and not isinstance(reply, Observation):
        raise EpisodeFailed("bad_reply", f"start() returned {type(reply).__name__}; expected Observation")
    if reply is None:
        raise EpisodeFailed("no_reply", f"{method}() returned nothing; expected Observation or End")
    if not isinstance(reply, Observation | End):
        raise EpisodeFailed("bad_reply", f"{method}() returned {type(reply).__name__}; expected Observation or End")
    if isinstance(reply, End):
        return reply
    if reply.messages is not None:
        for message in reply.messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise EpisodeFailed(
                    "bad_reply", f"{method}() gave the message {message!r:.200}; expected role and content"
                )
    if method == "step" and reply.text is None and not reply.messages:
        raise EpisodeFailed("no_reply", "step() gave an observation without messages and without text")
    if reply.text is not None and (reply.messages or method == "start"):
        raise EpisodeFailed(
            "bad_reply", f"{method}() gave text; at the start, or with messages, there is nothing to append it to"
        )
    if reply.state is not None and not isinstance(reply.state, str):
        raise EpisodeFailed(
            "bad_reply", f"{method}() gave a state of type {type(reply.state).__name__}; expected a text"
        )
    return reply


def checked_roles(reply: Observation | End, method: str, roles: tuple[str, ...]) -> Observation | End:
    """Check the roles that a reply names. What an unknown role writes or earns would belong to no trajectory."""
    if isinstance(reply, End):
        if unknown := [role for role in (*(reply.rewards or ()), *(reply.successes or ())) if role not in roles]:
            known = f"its roles are {', '.join(roles)}" if roles else "it has no `roles`, so give `reward`"
            raise EpisodeFailed("bad_reply", f"{method}() gave a result to the role {unknown[0]!r}; {known}")
    elif (reply.role not in roles) if roles else (reply.role is not None):
        known = f"expected one of {', '.join(roles)}" if roles else "its class has no `roles`; list them there"
        raise EpisodeFailed("bad_reply", f"{method}() gave the turn to the role {reply.role!r}; {known}")
    return reply


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError(
        "an environment that runs in the runner waited for something; give it runs_in = 'loop' or 'worker'"
    )


class EnvironmentHost:
    """Opens sessions of one configured environment and runs their calls. The event loop starts with the first call that needs it."""

    def __init__(self, kind: EnvironmentKind, make_workers: MakeWorkers | None = None) -> None:
        self.kind = kind
        self.make_workers = make_workers
        self.log: WorkerLog | None = None
        """Where the output of worker processes goes; set it before the first call."""
        self._last_counts: dict[str, int] = {}
        self._workers: ObjectWorkers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._has_warned = False

    def open(self) -> Session:
        """Return the session of a new episode. Its environment is made by the first call."""
        return Session(self.kind, self)

    def ask(
        self,
        session: Session,
        method: Literal["start", "step", "end"],
        argument: Episode | Answer | str,
        ticket: Any,
        replies: queue.SimpleQueue[HostReply],
        on_reply: Callable[[], None],
    ) -> Reply | None:
        """Call a method of an environment. Returns its reply if it runs at once; otherwise None, and the reply is put into `replies`.

        `on_reply` is called in the event loop's thread after the put.
        """
        if self.kind.runs_in == "runner":
            return run_now(_reply(session.call(method, argument)))

        async def answer() -> None:
            async with session.lock:
                reply = await _reply(session.call(method, argument))
            replies.put(HostReply(ticket, reply))
            on_reply()

        self._spawn(answer(), self._calls)
        return None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the event loop. It must handle its own errors. `close` cancels it."""
        self._spawn(work, self._calls)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and wait for its result. Not to be called in the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self._event_loop()).result()

    def close_session(self, session: Session) -> None:
        """Close a session. Returns at once; a failure to close is no failure of the episode, which has ended."""
        if self.kind.runs_in == "runner":
            run_now(session.close())
        elif self._loop is not None:
            self._spawn(self._close_session(session), self._closing)

    async def _close_session(self, session: Session) -> None:
        """Close a session once its call has ended. The first failure is a warning; the episodes themselves have ended well."""
        try:
            async with session.lock:
                await asyncio.wait_for(session.close(), session.kind.deadline_s)
        except Exception as error:  # noqa: BLE001 (a user's close() may raise anything)
            if not self._has_warned:
                self._has_warned = True
                logger.warning("close() of environment %s failed, and may leave things open: %s", self.kind.name, error)

    async def workers(self) -> ObjectWorkers:
        """Return the worker processes; start them with the first call. Runs in the event loop."""
        if self._workers is None:
            assert self.make_workers is not None, "an environment that runs in workers has some"
            self._workers = self.make_workers()
            self._workers.log = self.log
        return self._workers

    def new_worker_counts(self) -> dict[str, int]:
        """Return the counters of the worker processes since the last call; {} if none were started."""
        if self._workers is None:
            return {}
        counts, last = self._workers.counters(), self._last_counts
        self._last_counts = counts
        return {name: count - last.get(name, 0) for name, count in counts.items()}

    def close(self) -> None:
        """Cancel all calls, wait for sessions that are being closed, close the workers and end the event loop's thread."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        asyncio.run_coroutine_threadsafe(self._shut_down(), loop).result(CLOSE_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_TIMEOUT_S)
        loop.close()

    async def _shut_down(self) -> None:
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if self._closing:  # an episode on a server would stay open there
            _, late = await asyncio.wait(self._closing, timeout=SESSIONS_TIMEOUT_S)
            for task in late:
                task.cancel()
        if self.kind.aclose is not None:
            await self.kind.aclose()
        if self._workers is not None:
            await self._workers.aclose()
            self._workers = None

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        loop = self._event_loop()

        def create() -> None:
            task = loop.create_task(work)
            tasks.add(task)  # the loop keeps only weak references to tasks
            task.add_done_callback(tasks.discard)

        loop.call_soon_threadsafe(create)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="burnish-environments", daemon=True)
            self._thread.start()
        return self._loop


async def _reply(work: Coroutine[Any, Any, Observation | End]) -> Reply:
    """Return the reply of a call, with failures as values."""
    try:
        return await work
    except (EpisodeFailed, UserError) as error:
        return error
