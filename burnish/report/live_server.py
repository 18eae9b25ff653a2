"""The live page: an HTTP server on this machine that shows runs while they train.

The page and its data have the guards of `burnish serve`: the server listens on loopback only, answers only to a Host that is
this machine (a web page under a name that resolves here could read answers otherwise), limits connections, and refuses requests
that other web sites cause in the user's browser. It only reads: there is no method but GET, and a path never becomes a file name.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from burnish.config.errors import UserError
from burnish.gateway.http_guards import ACCEPTED_AT_ONCE, host_name, is_this_machine, limited_protocol, process_limits
from burnish.report.html_report import live_document, static_file
from burnish.report.live_samples import ChangedTable, json_bytes
from burnish.report.page_data import MAX_POINTS, RunData
from burnish.report.run_list import RunList
from burnish.report.scaling_files import HTML_NAME, JSON_NAME, POLICY, scaling_index

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHUTDOWN_S = 2
MAX_NUMBER = 10**12
MAX_WORDS = 1000
NO_RUN = "no such run: its folder is gone, or it was never on this page\n"
NO_SCALING = "no such measurement: its folder is gone, or it was never on this page\n"
NO_PAGE = f"the folder has no {HTML_NAME}: burnish view FOLDER --report writes it again from {JSON_NAME}\n"
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class LocalOnly:
    """ASGI middleware that refuses other hosts' names and requests that another web site causes, and adds security headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        refusal = refused(Headers(scope=scope), scope["path"])
        answer = self.app if refusal is None else PlainTextResponse(refusal, 403)
        await answer(scope, receive, send_with_headers)


def refused(headers: Headers, path: str) -> str | None:
    """Return why a request is refused, or None."""
    name = host_name(headers.get("host", ""))
    if not is_this_machine(name):
        return f"this page answers only to localhost, not to {name!r}; from another machine, use ssh -L\n"
    # Browsers say where a request comes from. A link from elsewhere may open the page itself, but nothing may read its data.
    if path != "/" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return "another web site may not read this page's data\n"
    return None


def make_app(runs: RunList) -> ASGIApp:
    """Return the ASGI application."""

    def page(request: Request) -> Response:
        shown = runs.summaries()
        if not shown["runs"] and shown["scalings"]:
            return scaling_start(shown["scalings"])
        content, policy = live_document()
        return Response(content, media_type="text/html", headers={"Content-Security-Policy": policy})

    def all_runs(request: Request) -> Response:
        return json_response(runs.summaries())

    def scaling(request: Request) -> Response:
        folder = runs.scaling(request.path_params["id"])
        if folder is None:
            return PlainTextResponse(NO_SCALING, 404)
        try:
            content = (folder / HTML_NAME).read_bytes()
        except FileNotFoundError:
            return PlainTextResponse(NO_PAGE, 404)
        return Response(content, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    def of_run(answer: Callable[[RunData, Request], Response]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            run = runs.get(request.path_params["id"])
            if run is None:
                return PlainTextResponse(NO_RUN, 404)
            try:
                return answer(run, request)
            except BadRequest as error:
                return PlainTextResponse(f"{error}\n", 400)
            except ChangedTable as error:
                return PlainTextResponse(f"{error}\n", 409)
            except FileNotFoundError:  # the folder is being removed
                return PlainTextResponse(NO_RUN, 404)
            except UserError as error:
                return PlainTextResponse(f"{error}\n", 500)

        return endpoint

    # An id may contain slashes, so the longer paths come first.
    routes = [
        Route("/", page),
        Route("/scaling/{id:path}", scaling),
        Route("/api/runs", all_runs),
        Route("/api/runs/{id:path}/metrics/{part}", of_run(_metrics)),
        Route("/api/runs/{id:path}/config", of_run(lambda run, _: json_response(run.config()))),
        Route("/api/runs/{id:path}/scored", of_run(lambda run, _: json_response(run.scored()))),
        Route("/api/runs/{id:path}/samples", of_run(_samples)),
        Route("/api/runs/{id:path}/search", of_run(_search)),
        Route("/api/runs/{id:path}/{kind}/{block:int}", of_run(_block)),
        Route("/api/runs/{id:path}", of_run(lambda run, _: json_response(run.overview()))),
    ]
    return LocalOnly(Starlette(routes=routes))


def scaling_start(names: list[str]) -> Response:
    """Return the start of a page without runs: the one measurement, or a list of them."""
    links = [f"scaling/{quote(name)}" for name in names]
    if len(links) == 1:
        return RedirectResponse(links[0])
    content = scaling_index(dict(zip(names, links, strict=True)), static_file("style.css"))
    return Response(content, media_type="text/html", headers={"Content-Security-Policy": POLICY})


class BadRequest(Exception):
    """A request whose numbers make no sense."""


def _metrics(run: RunData, request: Request) -> Response:
    part = request.path_params["part"]
    if part not in MAX_POINTS:
        raise BadRequest(f"metrics have the parts {', '.join(MAX_POINTS)}, not {part!r}")
    return json_response(run.metrics(part, number(request, "since"), number(request, "generation")))


def _samples(run: RunData, request: Request) -> Response:
    return json_response(run.samples(number(request, "since"), number(request, "generation")))


def _search(run: RunData, request: Request) -> Response:
    words = request.query_params.get("words", "")
    if not 0 < len(words) <= MAX_WORDS:
        raise BadRequest(f"words: expected 1 to {MAX_WORDS} characters")
    return json_response(run.search(words, number(request, "first"), number(request, "last")))


def _block(run: RunData, request: Request) -> Response:
    kind, block = request.path_params["kind"], request.path_params["block"]
    if kind not in ("texts", "tokens") or block >= len(run.live_samples.blocks):
        raise BadRequest(f"no block {block} of {kind}")
    generation = number(request, "generation") if "generation" in request.query_params else None
    return Response(run.block(kind, block, generation), media_type="application/octet-stream")


def number(request: Request, name: str) -> int:
    """Return a whole number of the query; 0 if it is not given."""
    text = request.query_params.get(name, "0")
    if not text.isdecimal() or int(text) > MAX_NUMBER:
        raise BadRequest(f"{name}={text!r}: expected a whole number")
    return int(text)


def json_response(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")


class PageServer(uvicorn.Server):
    """A uvicorn server that logs when it is ready and stops at the first signal."""

    def __init__(self, runs: RunList, log: Callable[[str], None], ready: str) -> None:
        self.log, self.ready = log, ready
        super().__init__(
            uvicorn.Config(
                make_app(runs),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
                lifespan="off",
                ws="none",
                http=limited_protocol(process_limits()),
                backlog=ACCEPTED_AT_ONCE,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.log(self.ready)

    def stop(self) -> None:
        """Accept no more requests, then end."""
        self.should_exit = True


def page_url(bound: socket.socket) -> str:
    """Return the address of the page at a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def run_page_server(runs: RunList, bound: socket.socket, log: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    server = PageServer(runs, log, f"live page: {page_url(bound)}   (Ctrl-C ends it; the runs go on)")

    def handle(signal_number: int, frame: FrameType | None) -> None:
        server.stop()

    # uvicorn raises the signal again after it has stopped. This handler prevents a traceback on Ctrl-C.
    previous: dict[int, Any] = {one: signal.signal(one, handle) for one in SIGNALS}
    is_over = threading.Event()
    reader = threading.Thread(target=runs.read_ahead, args=(is_over,), name="read ahead")
    reader.start()
    try:
        server.run([bound])
    finally:
        is_over.set()
        reader.join()
        bound.close()
        for one, handler in previous.items():
            signal.signal(one, handler)
