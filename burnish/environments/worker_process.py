"""The worker process: `python -m burnish.environments.worker_process SOCKET LIFELINE MARK`, started by `worker_link.py`.

It reads its limits from the first message and reports that it is ready. Then it answers requests in any order until the socket closes. It
imports no torch, so that it starts quickly and takes little memory. What user code prints goes to standard output and error, which the
runner reads and logs; it never mixes with the messages. MARK is a file in memory with the id of the request that the event loop is running,
which the runner reads when this process does not answer.
"""

from __future__ import annotations

import asyncio
import faulthandler
import mmap
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from burnish.environments.object_host import ObjectHost
from burnish.environments.wire import MARK, MessageReader, frame
from burnish.rewards import worker_limits
from burnish.run.supervisor.processes import STACKS_SIGNAL

MAX_OPEN_FILES = 4096
"""A worker hosts thousands of episodes, some of which hold a connection."""


class Connection(asyncio.Protocol):
    """The worker's end of the socket. Each request is answered by a task of its own."""

    def __init__(self, mark: Callable[[int], None]) -> None:
        self._mark = mark
        self._reader = MessageReader(self._receive)
        self._host: ObjectHost | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        os._exit(0)  # threads that were left behind cannot be joined

    def _receive(self, message: dict[str, Any]) -> None:
        if self._host is None:  # the first message
            worker_limits.limit_resources(message["memory_gib"], MAX_OPEN_FILES)
            self._host = ObjectHost(message["max_threads"], message["max_reply_bytes"], self._mark)
            self._send({"id": message["id"], "value": None})
        elif message["do"] == "ping":
            self._send({"id": message["id"], "value": None})
        else:
            task = asyncio.create_task(self._answer(self._host, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, host: ObjectHost, message: dict[str, Any]) -> None:
        reply = await host.answer(message)
        try:
            self._send({"id": message["id"], **reply})
        except MemoryError as error:
            self._send({"id": message["id"], **host.failed_reply("the reply", error, "bad_reply")})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._transport is not None
        self._transport.write(frame(message))


async def serve(channel: socket.socket, mark: Callable[[int], None]) -> None:
    """Answer requests until the process is ended by the closed socket."""
    await asyncio.get_running_loop().create_connection(lambda: Connection(mark), sock=channel)
    await asyncio.Event().wait()


def main() -> None:
    """Tie this process to its parent, and serve."""
    channel, lifeline, marks = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    for descriptor in (channel.fileno(), lifeline, marks):
        os.set_inheritable(descriptor, False)  # programs that user code starts must not hold the connection open
    worker_limits.die_with_parent(lifeline)
    os.register_at_fork(after_in_child=channel.close)  # nor children that it forks
    faulthandler.register(STACKS_SIGNAL)  # the runner asks for the stacks of a worker that does not answer
    shared = mmap.mmap(marks, MARK.size)
    asyncio.run(serve(channel, lambda request: MARK.pack_into(shared, 0, request)))


if __name__ == "__main__":
    main()
