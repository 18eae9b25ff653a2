"""Around every request: the API key before it, a line in the log after it."""

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


class Guard:
    """An application behind a key, with a log."""

    def __init__(self, app: ASGIApp, api_key: str | None, log: Callable[[str], None]) -> None:
        self.app, self.api_key, self.log = app, api_key, log

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
            await (self.app if self._may_enter(scope) else _turn_away)(scope, watched_receive, watched_send)
        finally:
            self._write(scope, status, time.perf_counter() - started, has_left)

    def _may_enter(self, scope: Scope) -> bool:
        if self.api_key is None:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # In constant time, so that a wrong key tells nothing about the right one.
        return hmac.compare_digest(given.strip().encode(), self.api_key.encode()) and scheme.lower() == "bearer"

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


async def _turn_away(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(
        401,
        "missing or wrong API key: send it as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
    await JSONResponse(error.body(), error.status, headers=error.headers)(scope, receive, send)
