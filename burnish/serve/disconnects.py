"""Answers that end with their client: work is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def unless_disconnected(request: Request, wanted: Awaitable[T]) -> T:
    """Await something; raise `ClientDisconnect` if the client disconnects first."""

    async def work() -> T:
        return await wanted

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work()), asyncio.create_task(left())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


class Cancellable(Protocol):
    """Work that can be ended early."""

    def cancel(self) -> object:
        """End it; no effect once it has ended."""


class EventStream(StreamingResponse):
    """A stream that cancels its work however it ends, also if the client disconnects."""

    def __init__(self, work: Cancellable, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self.work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.work.cancel()
