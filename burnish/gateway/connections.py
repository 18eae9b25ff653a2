"""Connection limits, API key and access log.

uvicorn waits without limit for the headers and the body of a request, and accepts connections up to the number of file
descriptors. A thousand silent sockets would lock out all other clients before a key is checked. Here a connection that does not
send its request in time is closed. With too many connections, the one that has been idle longest is closed for the new one.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

import h11
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from burnish.gateway.openai_schema import ApiError
from burnish.gateway.protocols import api_key, error_at

MAX_CONNECTIONS = 4096
SPARE_FILES = 128
"""File descriptors reserved for other files, and for accepted connections that are not counted yet."""
MIN_CONNECTIONS = 16
ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the event loop. Closing one for another takes several turns, in which both are open."""
MAX_NOTE = 300
HEALTH = "/health"


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


# --- API key and access log ----------------------------------------------------------------------------------------------


class AccessMiddleware:
    """ASGI middleware that checks the API key, or the Host header without one, and logs every request."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, log: Callable[[str], None], count: Callable[[str, int, bool], None]
    ) -> None:
        self.app, self.api_key, self.log = app, api_key, log
        self.count = count
        """Called with the path and status of every answer, and whether its client disconnected before the end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status, is_complete, has_left = 0, False, False
        scope.setdefault("state", {})["note"] = str

        async def watched_send(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                is_complete = True
            await send(message)

        async def watched_receive() -> Message:
            nonlocal has_left
            message = await receive()
            # After the answer a disconnect is also reported for a client that stays connected.
            has_left |= message["type"] == "http.disconnect" and not is_complete
            return message

        try:
            refusal = self._refusal(scope)
            answer = self.app
            if refusal is not None:
                number, body = error_at(scope["path"], refusal)
                answer = JSONResponse(body, number, headers=refusal.headers)
            await answer(scope, watched_receive, watched_send)
        finally:
            self._write(scope, status, time.perf_counter() - started, has_left)
            self.count(scope["path"], status or 500, has_left)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that reads the other header would split the bytes into other requests (request smuggling; RFC 9112, 6.3).
            return ApiError(
                400,
                "a request has Content-Length or Transfer-Encoding, not both",
                code="ambiguous_length",
                headers={"Connection": "close"},
            )
        if scope["path"] == HEALTH:  # for probes, which have no key; the answer tells only whether the server is up
            return None
        if self.api_key is None:
            here, asked = (scope.get("server") or ("", 0))[0], _host_name(headers.get("host", ""))
            if not _is_this_machine(here) or _is_this_machine(asked):
                return None
            # DNS rebinding: a web page under a name that resolves to this machine could read the answers.
            return ApiError(
                403,
                f"this server has no API key and answers only to localhost, not to {asked!r}; start it with "
                "--api-key to reach it by another name",
                code="unknown_host",
            )
        given = api_key(headers)
        # In constant time, so that timing reveals nothing about the key.
        if given is not None and hmac.compare_digest(given.encode(), self.api_key.encode()):
            return None
        return ApiError(
            401,
            "missing or wrong API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _write(self, scope: Scope, status: int, seconds: float, has_left: bool) -> None:
        note = scope["state"]["note"]()[:MAX_NOTE]
        parts = [
            time.strftime("%H:%M:%S"),
            scope["method"],
            quote(scope["path"]),
            str(status or 500),
            f"{seconds:.2f} s",
            "client left" if has_left else "",
            note,
        ]
        # The text may contain what a client sent: replace control characters, so that it stays one line.
        self.log(_one_line("  ".join(part for part in parts if part)))


def _host_name(header: str) -> str:
    """The name in a Host header, without the port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


def _is_this_machine(host: str) -> bool:
    """Whether a name always resolves to the local machine."""
    name = host.lower().rstrip(".")
    return (
        name in ("localhost", "::1")
        or name.endswith(".localhost")
        or (name.startswith("127.") and name.replace(".", "").isdecimal())
    )


def _one_line(text: str) -> str:
    """A text with `?` for control characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
