"""`RecordingEndpoint`: the HTTP server that agents call. Each episode has a base URL and a key of its own.

    POST {base_url}/chat/completions, /completions, /responses, /messages      the protocols
    POST {root}/s/ID/inference/v1/generate                                     token ids in, token ids out
    GET  {base_url}/models                                                     the model, under any name
    POST {base_url}/rewards                                                    {"id": answer id, "reward": number}

The header `X-Reward` of a call gives the answer before it a reward. The server listens on loopback and runs in the event loop of the
environments, beside the processes of the agents. A call costs no row of the engine until it is submitted there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from burnish.gateway.calls import CallAnswer, ModelCall
from burnish.gateway.http_guards import limited_protocol, process_limits, raise_file_limit
from burnish.gateway.openai_schema import ApiError, internal_error, json_object
from burnish.gateway.protocols import KEEP_ALIVE, PROTOCOLS, CallProtocol, api_key
from burnish.gateway.request_bodies import BodyReader
from burnish.gateway.session import AgentSession, SampleRequest, SessionLimits, SessionSpent
from burnish.gateway.session_renderer import SessionRenderer

ROUTES: dict[str, CallProtocol] = {protocol.path: protocol for protocol in PROTOCOLS}
COUNT_ROUTES = {protocol.count_path: protocol for protocol in PROTOCOLS if protocol.count_path is not None}
MAX_BODY_BYTES = 64 << 20
INLINE_BYTES = 1 << 15
"""Requests of at most this size are parsed in the event loop: that takes at most about as long as a thread's start and end."""
MAX_ENDED = 65_536
"""Sessions that are remembered after their end, so that late calls are told apart from wrong addresses."""
EARLY_ANSWER_S = 2.0
"""A stream begins after so long without an answer. Before that, an error still has its own HTTP status."""
KEEP_ALIVE_S = 10.0
"""How often a stream that waits for the engine sends a comment."""
IDLE_CONNECTION_S = 600
"""An idle connection is closed after so long. Agents think and run tools between two calls; a client that sends its next call at the moment in
which the server closes the connection gets an error."""
STOP_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"


class RecordingEndpoint:
    """Serves the sessions of a run. All methods run in one event loop."""

    def __init__(self, renderer: SessionRenderer, host: str = LOOPBACK) -> None:
        self.renderer, self.host = renderer, host
        self.num_unknown = 0
        """Requests with an address or a key of no session."""
        self._sessions: dict[str, AgentSession] = {}
        self._ended: dict[str, None] = {}
        self._bodies = BodyReader(MAX_BODY_BYTES, inline_bytes=INLINE_BYTES)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._root_url = ""

    async def start(self) -> None:
        """Listen on a free port. Returns when calls are accepted. A second call does nothing."""
        if self._serving is not None:
            return
        raise_file_limit()  # a thousand agents hold a connection each
        bound = socket.create_server((self.host, 0), backlog=2048)
        self._root_url = f"http://{self.host}:{bound.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                log_config=None,
                log_level="error",  # an agent may send garbage a thousand times
                access_log=False,
                server_header=False,
                lifespan="off",
                interface="asgi3",
                proxy_headers=False,
                ws="none",
                http=limited_protocol(process_limits()),
                timeout_graceful_shutdown=1,
                timeout_keep_alive=IDLE_CONNECTION_S,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            await self._serving  # raises what it failed with

    async def close(self) -> None:
        """End all sessions and the server."""
        for session in list(self._sessions.values()):
            self.end(session)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, STOP_TIMEOUT_S)
            self._serving = None

    def open(self, name: str, limits: SessionLimits, submit: Callable[[SampleRequest], None]) -> AgentSession:
        """Return a new session. `submit` gets its samples."""
        session = AgentSession(name, self._root_url, self.renderer, limits, submit)
        self._sessions[session.id] = session
        return session

    def end(self, session: AgentSession) -> None:
        """End a session. Its tree stays readable."""
        session.end()
        if self._sessions.pop(session.id, None) is not None:
            self._ended[session.id] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    # --- requests --------------------------------------------------------------------------------------------------------

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. Whatever goes wrong is answered in the words of the protocol that was spoken."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive, send)
        protocol: CallProtocol | None = None
        try:
            session_id, path = _split_path(scope["path"])
            protocol = ROUTES.get(path) or COUNT_ROUTES.get(path)
            session = self._session(session_id, request)
            response = await self._response(request, session, path, protocol)
        except ClientDisconnect:
            return
        except ApiError as error:
            response = _error_response(error, protocol)
        except Exception:  # the agent gets a plain 500; the server logs the traceback
            await _error_response(internal_error(), protocol)(scope, receive, send)
            raise
        await response(scope, receive, send)

    def _session(self, session_id: str, request: Request) -> AgentSession:
        """Return the session that a request names by address and key."""
        session = self._sessions.get(session_id)
        if session is None:
            if session_id in self._ended:
                raise ApiError(410, "this session has ended: its episode is over", code="session_ended")
            self.num_unknown += 1
            raise ApiError(404, "there is no session at this address", code="unknown_session")
        given = api_key(request.headers) or ""
        if not hmac.compare_digest(given.encode(), session.api_key.encode()):
            self.num_unknown += 1
            raise ApiError(401, "this key does not belong to this session", code="invalid_api_key")
        return session

    async def _response(
        self, request: Request, session: AgentSession, path: str, protocol: CallProtocol | None
    ) -> Response:
        if request.method == "GET" and path == "/models":
            return JSONResponse({"object": "list", "data": [self._card(session)]})
        if request.method != "POST" or (protocol is None and path != "/rewards"):
            raise ApiError(404, f"{request.method} {path}: there is no such route", code="not_found")
        headers = {name.lower(): value for name, value in request.headers.items()}
        if protocol is None:
            _rewarded(session, await self._bodies.work(request, json_object))
            return JSONResponse({"object": "reward"})
        spoken = protocol

        def prepare(body: bytearray) -> tuple[ModelCall, bytes, int]:
            digest = hashlib.blake2b(body, digest_size=16, key=path.encode()).digest()
            return spoken.parse(body, headers), digest, len(body)

        try:
            call, digest, num_bytes = await self._bodies.work(request, prepare)
        except ApiError:
            session.counts["calls_refused"] += 1
            raise
        is_retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        if "x-reward" in headers and not is_retry:  # the first try has given it
            session.reward_last(_number(headers["x-reward"], "X-Reward"))
        if path in COUNT_ROUTES:
            return JSONResponse(spoken.token_count(session.count_tokens(call)))
        key = headers.get("idempotency-key")
        answering = asyncio.ensure_future(_answered(session, spoken, call, digest, num_bytes, key, is_retry))
        if not call.is_stream:
            return JSONResponse(spoken.whole(call, await _unless_left(request, session, answering)))
        await asyncio.wait([answering], timeout=EARLY_ANSWER_S)
        if answering.done():
            answering.result()  # raises before the headers of a stream are sent
        stream = _events(answering, call, spoken)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    def _card(self, session: AgentSession) -> dict[str, Any]:
        longest = session.limits.longest
        return {"id": "policy", "object": "model", "created": 0, "owned_by": "burnish", "max_model_len": longest}


def _split_path(path: str) -> tuple[str, str]:
    """Return the session and the route of a path. `/v1` in front of the route may be left out or doubled, as clients do."""
    parts = path.split("/", 3)
    if len(parts) < 4 or parts[1] != "s":
        raise ApiError(404, "expected the base URL of a session, /s/ID/v1", code="unknown_session")
    route = f"/{parts[3]}"
    if route in ROUTES:
        return parts[2], route
    while route.startswith("/v1/"):
        route = route.removeprefix("/v1")
    return parts[2], route


async def _answered(
    session: AgentSession,
    protocol: CallProtocol,
    call: ModelCall,
    digest: bytes,
    num_bytes: int,
    retry_key: str | None,
    is_retry: bool,
) -> CallAnswer:
    """Answer a call. An agent whose calls are spent gets an answer in words: an empty one or an error makes agents try for ever."""
    try:
        return await session.answer(call, digest, num_bytes, retry_key, is_retry)
    except SessionSpent as spent:
        return protocol.stopped(call, "spent", int(time.time()), f"({spent}. The episode is over.)")


async def _unless_left(request: Request, session: AgentSession, answering: asyncio.Future[CallAnswer]) -> CallAnswer:
    """Await an answer; raise `ClientDisconnect` if the client leaves first. The call itself goes on."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(left())
    try:
        either: list[asyncio.Future[Any]] = [answering, leaving]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            session.counts["clients_left"] += 1
            raise ClientDisconnect
        return answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


async def _events(answering: asyncio.Future[CallAnswer], call: ModelCall, protocol: CallProtocol) -> AsyncIterator[str]:
    """Yield the events of a stream: comments while the engine works, then the answer."""
    try:
        while not answering.done():
            await asyncio.wait([answering], timeout=KEEP_ALIVE_S)
            if not answering.done():
                yield KEEP_ALIVE
        try:
            answer = answering.result()
        except ApiError as error:
            yield protocol.error_event(error)
            return
        for event in protocol.events(call, answer):
            yield event
    finally:
        answering.cancel()  # the client left; the call itself goes on


def _error_response(error: ApiError, protocol: CallProtocol | None) -> Response:
    status, body = (error.status, error.body()) if protocol is None else protocol.error(error)
    return JSONResponse(body, status, headers=error.headers)


def _rewarded(session: AgentSession, body: dict[str, Any]) -> None:
    if not isinstance(body.get("id"), str):
        raise ApiError(400, 'expected {"id": answer id, "reward": number}', code="invalid_value")
    session.reward(body["id"], _number(body.get("reward"), "reward"))


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ApiError(400, f"{what}: expected a finite number, got {value!r:.80}", param=what, code="invalid_value")
    return number
