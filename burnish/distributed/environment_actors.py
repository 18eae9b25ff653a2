"""Environment workers on the machines of a Ray cluster: the same pool as on one machine, with processes that actors start.

An `EnvironmentHost` is an actor on one machine. It starts worker processes there and forwards requests to them, so that limits, deadlines and
the causes of deaths are the same as without Ray, and user code never runs in Ray's own process. The driver has an `ObjectWorkers` whose links
go through the actors. Messages travel in batches: a message of its own for each call would cost the driver 0.6 ms.

    workers = RayObjectWorkers(actor_starter(num_cpus=2), num_actors=4, workers_per_actor=8)
    game = await workers.open(ObjectSpec("my_env.py:Game", base=folder))

An actor that ends or does not answer fails the calls of its workers as `died`; the next worker that is started gets a new actor.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from burnish.environments.worker_link import (
    HEARTBEAT_S,
    START_TIMEOUT_S,
    WorkerEnd,
    WorkerGone,
    WorkerLimits,
    WorkerLink,
    start_worker,
)
from burnish.environments.worker_output import OnOutput
from burnish.environments.workers import ObjectWorkers

ACTOR_START_TIMEOUT_S = 120.0
"""How long an actor may take to start: Ray may have to start a process on another machine first."""
MAX_BATCH = 1000

StartActor = Callable[[], Any]
"""Starts an `EnvironmentHost`, and returns its handle."""
Message = tuple[int, dict[str, Any]]
"""A worker's number, and a message to it or from it."""


# --- The actor ---------------------------------------------------------------------------------------------------------


class EnvironmentHost:
    """The Ray actor: starts worker processes on its machine, and forwards requests and replies in batches."""

    def __init__(self) -> None:
        self._links: dict[int, WorkerLink] = {}
        self._replies: list[Message] = []
        self._has_replies = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def deliver(self, messages: list[Message]) -> None:
        """Begin what the messages ask for; also shows that the actor answers."""
        for number, message in messages:
            task = asyncio.create_task(self._do(number, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def collect(self) -> list[Message]:
        """Wait for replies, and return those that are there."""
        await self._has_replies.wait()
        replies, self._replies = self._replies[:MAX_BATCH], self._replies[MAX_BATCH:]
        if not self._replies:
            self._has_replies.clear()
        return replies

    async def _do(self, number: int, message: dict[str, Any]) -> None:
        request = message.pop("id")
        try:
            if message["do"] == "start":
                on_output = self._output_of(number) if message["is_logged"] else None
                self._links[number] = link = await start_worker(number, message["limits"], on_output)
                link.gone.add_done_callback(lambda gone: self._reply(number, {"ended": gone.result()}))
                reply: dict[str, Any] = {"value": None}
            elif number not in self._links:
                reply = {"gone": f"environment worker {number} has ended", "is_to_blame": False}
            elif message["do"] == "kill":
                self._links[number].kill(message["reason"])
                return
            else:
                reply = await self._links[number].request(message)
        except WorkerGone as gone:
            reply = {"gone": str(gone), "is_to_blame": gone.is_to_blame}
        self._reply(number, {**reply, "id": request})

    def _output_of(self, number: int) -> OnOutput:
        """Send what a process prints to the driver, which has the log."""
        return lambda lines: self._reply(number, {"output": lines})

    def _reply(self, number: int, reply: dict[str, Any]) -> None:
        if "ended" in reply:
            self._links.pop(number, None)
        self._replies.append((number, reply))
        self._has_replies.set()


def actor_starter(**options: Any) -> StartActor:
    """A function that starts an actor with these options of Ray, such as `num_cpus` or `scheduling_strategy`."""

    def start() -> Any:
        remote: Any = ray.remote
        return remote(EnvironmentHost).options(max_restarts=0, **options).remote()

    return start


# --- The driver --------------------------------------------------------------------------------------------------------


class RayWorkerLink:
    """The driver's end of a worker process that an actor has started."""

    def __init__(self, host: _Host, number: int, on_output: OnOutput | None) -> None:
        self.gone: asyncio.Future[WorkerEnd] = asyncio.get_running_loop().create_future()
        self._host = host
        self._number = number
        self._on_output = on_output
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @property
    def is_ending(self) -> bool:
        return self.gone.done()

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.gone.done():
            raise WorkerGone(self.gone.result().text)
        request = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[request] = future
        self._host.send(self._number, {"id": request, **message})
        try:
            reply = await future
        finally:
            del self._pending[request]
        if "gone" in reply:
            raise WorkerGone(reply["gone"], reply["is_to_blame"])
        return reply

    def kill(self, reason: str) -> None:
        if not self.gone.done():
            self._host.send(self._number, {"id": -1, "do": "kill", "reason": reason})

    def receive(self, reply: dict[str, Any]) -> None:
        """Take a reply of the actor."""
        if "ended" in reply:
            self.end(reply["ended"])
        elif "output" in reply:
            if self._on_output is not None:
                self._on_output(reply["output"])
        elif (future := self._pending.get(reply["id"])) is not None and not future.done():
            future.set_result(reply)

    def end(self, end: WorkerEnd) -> None:
        """The process is gone, or the actor that started it."""
        if not self.gone.done():
            self.gone.set_result(end)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerGone(end.text))


class _Host:
    """The driver's end of an actor, with the links of its workers. Three tasks send, receive, and watch that it answers."""

    def __init__(self, actor: Any, unresponsive_s: float) -> None:
        self.links: dict[int, RayWorkerLink] = {}
        self.has_ended = False
        self._actor = actor
        self._unresponsive_s = unresponsive_s
        self._outgoing: list[Message] = []
        self._has_outgoing = asyncio.Event()
        self._tasks = [asyncio.create_task(self._guard(work())) for work in (self._send, self._collect, self._watch)]

    def send(self, number: int, message: dict[str, Any]) -> None:
        """Send a message with the next batch."""
        self._outgoing.append((number, message))
        self._has_outgoing.set()

    def end(self, end: WorkerEnd) -> None:
        """End the actor and all its workers, which die with it."""
        if self.has_ended:
            return
        self.has_ended = True
        ray.kill(self._actor)
        for link in list(self.links.values()):
            link.end(end)
        for task in self._tasks:
            task.cancel()

    async def _guard(self, work: Any) -> None:
        try:
            await work
        except RayError as error:
            from burnish.distributed.ray_actors import exit_reason  # it loads torch, which no actor of this file needs

            self.end(WorkerEnd(f"the actor of an environment worker has ended: {exit_reason(error)}", "died"))

    async def _send(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            batch, self._outgoing = self._outgoing, []
            await _result(self._actor.deliver.remote(batch))

    async def _collect(self) -> None:
        while True:
            for number, reply in await _result(self._actor.collect.remote()):
                if (link := self.links.get(number)) is not None:
                    link.receive(reply)
                    if link.gone.done():
                        del self.links[number]

    async def _watch(self) -> None:
        limit_s = ACTOR_START_TIMEOUT_S
        while True:
            pong = asyncio.ensure_future(_result(self._actor.deliver.remote([])))
            await asyncio.wait([pong], timeout=limit_s)
            if not pong.done():
                pong.cancel()
                self.end(WorkerEnd(f"the actor of an environment worker did not answer for {limit_s:g} s", "died"))
            await pong
            limit_s = self._unresponsive_s
            await asyncio.sleep(HEARTBEAT_S)


async def _result(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())


class RayObjectWorkers(ObjectWorkers):
    """A pool of worker processes that `num_actors` actors start, `workers_per_actor` each. The interface is that of `ObjectWorkers`."""

    def __init__(
        self,
        start_actor: StartActor,
        num_actors: int,
        workers_per_actor: int,
        limits: WorkerLimits | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_actors * workers_per_actor, limits, start=self._start_remote, **options)
        self._start_actor = start_actor
        self._num_actors = num_actors
        self._hosts: list[_Host] = []

    async def aclose(self) -> None:
        await super().aclose()
        for host in self._hosts:
            host.end(WorkerEnd("was ended with the pool", "ended"))

    async def _start_remote(
        self, number: int, limits: WorkerLimits, on_output: OnOutput | None = None
    ) -> RayWorkerLink:
        """Start a worker process on the machine with the fewest."""
        self._hosts = [host for host in self._hosts if not host.has_ended]
        while len(self._hosts) < self._num_actors:
            self._hosts.append(_Host(self._start_actor(), limits.unresponsive_s))
        host = min(self._hosts, key=lambda one: len(one.links))
        host.links[number] = link = RayWorkerLink(host, number, on_output)
        start = link.request({"do": "start", "limits": limits, "is_logged": on_output is not None})
        try:
            await asyncio.wait_for(start, START_TIMEOUT_S + ACTOR_START_TIMEOUT_S)
        except (WorkerGone, TimeoutError) as error:
            host.links.pop(number, None)
            raise WorkerGone(str(error) or f"environment worker {number} did not start in time") from error
        return link
