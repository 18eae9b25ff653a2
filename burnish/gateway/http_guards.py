"""Guards of an HTTP server on this machine: connection limits, names that are this machine, and a bound socket.

uvicorn waits without limit for the headers and the body of a request, and accepts connections up to the number of file
descriptors. A thousand silent sockets would lock out all other clients before a key is checked. Here a connection that does not
send its request in time is closed. With too many connections, the one that has been idle longest is closed for the new one.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from burnish.config.errors import UserError

MAX_CONNECTIONS = 4096
SPARE_FILES = 128
"""File descriptors reserved for other files, and for accepted connections that are not counted yet."""
MIN_CONNECTIONS = 16
ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the event loop. Closing one for another takes several turns, in which both are open."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Time limits of a request, and the number of connections."""

    headers_s: float = 20.0
    """From the connection, or from the first byte of a further request, to the end of the headers."""
    body_s: float = 120.0
    """From the end of the headers to the end of the body."""
    most: int = MAX_CONNECTIONS
    """Most connections at the same time."""


def process_limits() -> ConnectionLimits:
    """The limits with a number of connections that the process's file limit allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (
        MAX_CONNECTIONS
        if files == resource.RLIM_INFINITY
        else max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, files - SPARE_FILES))
    )
    return ConnectionLimits(most=most)


def raise_file_limit() -> None:
    """Let this process open as many files as `MAX_CONNECTIONS` takes, if the system allows it. The usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol on h11, with `limits`."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

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
        """Whether no request of the connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Start the timer for what the client must send next, unless it runs already."""
        theirs = self.conn.their_state
        if self.transport.is_closing():
            self._set_phase(None)
        elif theirs is h11.SEND_BODY:
            self._set_phase(("body", self.cycle))
        elif theirs is h11.IDLE and (self.conn.trailing_data[0] or self.timeout_keep_alive_task is None):
            # uvicorn has no keep-alive timer for a new connection, or if the rest of a body comes after the answer.
            self._set_phase(("headers", self.cycle))
        else:  # a complete request, or a kept-alive connection, which uvicorn closes by its own timer
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
        """Close the connection. The client gets the status unless an answer has started."""
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                self.transport.write(head.encode())
            self.transport.close()
        self._set_phase(None)
        self.connections.discard(self)


def limited_protocol(limits: ConnectionLimits) -> type[LimitedProtocol]:
    """The protocol class with these limits."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})


# --- Names and sockets --------------------------------------------------------------------------------------------------


def host_name(header: str) -> str:
    """The name in a Host header, without the port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


def is_this_machine(host: str) -> bool:
    """Whether a name always resolves to the local machine."""
    name = host.lower().rstrip(".")
    return (
        name in ("localhost", "::1")
        or name.endswith(".localhost")
        or (name.startswith("127.") and name.replace(".", "").isdecimal())
    )


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded. Port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host}: {error}") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UserError(
            f"cannot listen at {host} port {port}: {error.strerror or error}; choose another --port (0 takes a free one)"
        ) from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    host = bound.getsockname()[0]
    return host == "::1" or host.startswith("127.")
