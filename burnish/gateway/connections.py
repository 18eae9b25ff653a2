"""API key, Host header and access log of the HTTP servers."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from burnish.gateway.http_guards import host_name, is_this_machine
from burnish.gateway.openai_schema import ApiError
from burnish.gateway.protocols import api_key, error_at

MAX_NOTE = 300
HEALTH = "/health"


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
            here, asked = (scope.get("server") or ("", 0))[0], host_name(headers.get("host", ""))
            if not is_this_machine(here) or is_this_machine(asked):
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


def _one_line(text: str) -> str:
    """A text with `?` for control characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
