"""Connections: how long a client may take to send a request, and how many connections there may be.

uvicorn waits without end for the headers and the body of a request, and for as many clients as there are file descriptors: a thousand
silent sockets would keep all others out, before any key is asked for. Here a connection that does not send its request in time is closed.
When there are too many connections, the one that has been idle longest is closed for the new one.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 4096
SPARE_FILES = 128
"""Files left for everything but connections, and for new connections that are accepted and not counted yet."""
LEAST = 16
ACCEPTED_AT_ONCE = 16
"""New connections that one turn of the event loop accepts. Closing one for another takes several turns, in which both have a file open."""


@dataclass(frozen=True)
class Limits:
    """The time limits of a request and the number of connections of a server."""

    headers_s: float = 20.0
    """From the connection, or the first byte of a further request, to the end of its headers."""
    body_s: float = 120.0
    """From there to the end of its body."""
    most: int = MOST
    """Connections at once."""


def limits_here() -> Limits:
    """The limits with as many connections as the process may open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if files == resource.RLIM_INFINITY else max(LEAST, min(MOST, files - SPARE_FILES))
    return Limits(most=most)


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol on h11, with `limits`."""

    limits: ClassVar[Limits] = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase: tuple[str, object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_phase(None)
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Start the timer of what the client has to send next, unless it runs already."""
        theirs = self.conn.their_state
        if self.transport.is_closing():
            self._set_phase(None)
        elif theirs is h11.SEND_BODY:
            self._set_phase(("body", self.cycle))
        elif theirs is h11.IDLE and (self.conn.trailing_data[0] or self.timeout_keep_alive_task is None):
            # uvicorn has no keep-alive timer for a new connection, nor where the rest of a body came after its answer.
            self._set_phase(("headers", self.cycle))
        else:  # a complete request, or a connection kept alive, which uvicorn closes after its own time
            self._set_phase(None)

    def _set_phase(self, phase: tuple[str, object] | None) -> None:
        if phase == self._phase:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._phase, self._timer = phase, None
        if phase is not None:
            seconds = self.limits.headers_s if phase[0] == "headers" else self.limits.body_s
            self._timer = self.loop.call_later(seconds, self._close, "408 Request Timeout")

    def _make_room(self) -> None:
        if len(self.connections) <= self.limits.most:
            return
        idle = [one for one in self.connections if isinstance(one, LimitedProtocol) and one.is_idle and one is not self]
        if idle:
            min(idle, key=lambda one: one._idle_since)._close("408 Request Timeout")
        else:
            self._close("503 Service Unavailable")

    def _close(self, status: str) -> None:
        """End the connection. The client gets the status unless an answer has begun."""
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                self.transport.write(head.encode())
            self.transport.close()
        self._set_phase(None)
        self.connections.discard(self)


def limited(limits: Limits) -> type[LimitedProtocol]:
    """The protocol with other limits."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})
