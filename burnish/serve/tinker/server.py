"""The HTTP server of the training API: it logs when it is ready and every refused request, and ends on SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from burnish.gateway.connections import AccessMiddleware
from burnish.gateway.http_guards import ACCEPTED_AT_ONCE, ConnectionLimits, limited_protocol
from burnish.serve.http_server import BACKLOG, SIGNALS
from burnish.serve.tinker.routes import Routes, make_app

GRACE_S = 5
"""Time for running answers at shutdown. A client that waits for a result asks again, and learns that the server has ended."""
QUIET_STATUSES = (408, 499)
"""Statuses of everyday life: no result yet, and a client that left."""


class TinkerServer(uvicorn.Server):
    """A uvicorn server that says when it is ready."""

    def __init__(
        self, routes: Routes, api_key: str | None, limits: ConnectionLimits, log: Callable[[str], None], ready: str
    ) -> None:
        self.log, self.ready = log, ready
        lines: list[str] = []

        def count(path: str, status: int, has_left: bool) -> None:
            line = lines.pop()
            if status >= 400 and status not in QUIET_STATUSES:
                log(line)

        super().__init__(
            uvicorn.Config(
                AccessMiddleware(make_app(routes), api_key, lines.append, count),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_S,
                lifespan="on",
                ws="none",
                http=limited_protocol(limits),
                backlog=ACCEPTED_AT_ONCE,
            )
        )

    def stop(self) -> None:
        """Accept no more requests, then end."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(BACKLOG)
        if self.started:
            self.log(self.ready)


def base_url(bound: socket.socket) -> str:
    """The value of TINKER_BASE_URL that reaches a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run_server(server: TinkerServer, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""

    def handle(number: int, frame: FrameType | None) -> None:
        server.stop()

    # uvicorn raises the signal again after it has stopped. This handler prevents a traceback on Ctrl-C.
    previous: dict[int, Any] = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        server.run([bound])
    finally:
        bound.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    server.log(f"{time.strftime('%H:%M:%S')}  stopped")
