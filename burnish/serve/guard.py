"""Around every request: the API key before it, or where it was sent to; a line in the log after it."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from burnish.serve.errors import ApiError

LONGEST_NOTE = 300
HEALTH = "/health"


class Guard:
    """An application behind a key, with a log."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, log: Callable[[str], None], count: Callable[[str, int, bool], None]
    ) -> None:
        self.app, self.api_key, self.log = app, api_key, log
        self.count = count
        """Called with the path and status of every answer, and whether its client left before the end."""

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
            # After the answer a server says the same of a client that stays.
            has_left |= message["type"] == "http.disconnect" and not is_complete
            return message

        try:
            refusal = self._refusal(scope)
            answer = (
                self.app if refusal is None else JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)
            )
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
        if scope["path"] == HEALTH:  # for probes, which have no key; the answer shows only whether the server serves
            return None
        if self.api_key is None:
            here, asked = (scope.get("server") or ("", 0))[0], _host(headers.get("host", ""))
            if not _is_this_machine(here) or _is_this_machine(asked):
                return None
            # A page whose name was made to mean this machine may read what is sent back to it.
            return ApiError(
                403,
                f"this server is for its own machine and asks for no key: it answers to localhost, not to {asked!r}; start it with "
                "--api-key to reach it by another name",
                code="unknown_host",
            )
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # In constant time, so that a wrong key tells nothing about the right one.
        if hmac.compare_digest(given.strip().encode(), self.api_key.encode()) and scheme.lower() == "bearer":
            return None
        return ApiError(
            401,
            "missing or wrong API key: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _write(self, scope: Scope, status: int, seconds: float, has_left: bool) -> None:
        note = scope["state"]["note"]()[:LONGEST_NOTE]
        parts = [
            time.strftime("%H:%M:%S"),
            scope["method"],
            quote(scope["path"]),
            str(status or 500),
            f"{seconds:.2f} s",
            "client left" if has_left else "",
            note,
        ]
        # What a client sent may be in it: one line stays one line, and moves no cursor.
        self.log("".join(c if c.isprintable() else "?" for c in "  ".join(part for part in parts if part)))


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


def _is_this_machine(host: str) -> bool:
    """Whether a name can mean nothing but the machine it is used on."""
    name = host.lower().rstrip(".")
    return (
        name in ("localhost", "::1")
        or name.endswith(".localhost")
        or (name.startswith("127.") and name.replace(".", "").isdecimal())
    )
