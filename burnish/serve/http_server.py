"""The uvicorn server: it logs a line when it is ready and one for each request, and shuts down gracefully on a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from burnish.gateway.connections import AccessMiddleware
from burnish.gateway.http_guards import ACCEPTED_AT_ONCE, ConnectionLimits, limited_protocol, process_limits
from burnish.serve.app import Api, make_app

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
"""Connections that the kernel queues until they are accepted."""
SLOW_CLIENT_TIMEOUT_S = 5
"""Time for slow clients to read the end of their answers at shutdown."""


class ApiServer(uvicorn.Server):
    """A uvicorn server that logs when it is ready, gives running requests `grace_s` at shutdown, and ends if the engine fails."""

    def __init__(
        self,
        api: Api,
        api_key: str | None,
        grace_s: int,
        log: Callable[[str], None],
        ready: str,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.api, self.grace_s, self.log, self.ready = api, grace_s, log, ready
        super().__init__(
            uvicorn.Config(
                AccessMiddleware(make_app(api), api_key, log, api.metrics.count_request),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=grace_s + SLOW_CLIENT_TIMEOUT_S,
                lifespan="on",
                ws="none",
                http=limited_protocol(limits or process_limits()),
                backlog=ACCEPTED_AT_ONCE,
            )
        )
        self._event_loop: asyncio.AbstractEventLoop | None = None
        api.async_engine.on_failure = self.stop

    def stop(self) -> None:
        """Accept no more requests, let running ones finish, then end."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops the server; a second one ends the grace period."""
        if self.should_exit and self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self.api.async_engine.close)
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(BACKLOG)  # asyncio uses one number for the backlog and for connections accepted in one turn
        if self.started:
            self.log(self.ready)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.tasks:
            self.log(f"stopping: running requests have {self.grace_s} s to finish (Ctrl-C: at once)")
        timer = asyncio.get_running_loop().call_later(self.grace_s, self.api.async_engine.close)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def server_url(bound: socket.socket) -> str:
    """The URL at which clients reach a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def run_server(
    api: Api, bound: socket.socket, *, api_key: str | None, grace_s: int, log: Callable[[str], None], note: str
) -> None:
    """Serve until SIGINT or SIGTERM (a second one ends it at once); raise if the engine failed."""
    ready = f"serving {api.served.name} at {server_url(bound)} ({note})"
    server = ApiServer(api, api_key, grace_s, log, ready)

    def handle(number: int, frame: FrameType | None) -> None:
        server.stop()

    # uvicorn raises the signal again after it has stopped. This handler prevents a traceback on Ctrl-C.
    previous: dict[int, Any] = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        server.run([bound])
    finally:
        api.async_engine.stop()
        bound.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if api.async_engine.failure is not None:
        raise api.async_engine.failure
    log("stopped")
