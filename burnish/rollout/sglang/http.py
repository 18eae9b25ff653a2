"""One HTTP call with a deadline, and what can go wrong with it."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

from burnish.config.errors import UserError
from burnish.core.http import connection_to, is_server_url

CONNECT_S = 5.0
SHOWN = 300
"""Characters of a server's own words in an error."""

Kind = Literal["refused", "failed", "unreachable", "late"]


class ServerError(Exception):
    """A server did not do what it was asked. The text says which server, what it was asked, and what came of it.

    `refused`: asking again is of no use. `failed`: it may pass. `unreachable`: nobody is there, or no more. `late`: the
    deadline has passed.
    """

    def __init__(self, kind: Kind, url: str, path: str, what: str) -> None:
        super().__init__(f"SGLang server {url}, {path}: {what}")
        self.kind, self.url, self.what = kind, url, what


def check_url(url: str) -> str:
    """The address of a server, without a slash at its end."""
    if not is_server_url(url):
        raise UserError(f"rollout.sglang.urls: {url!r} is no address of a server; write it as http://host:30000")
    return url.rstrip("/")


def call(url: str, path: str, timeout_s: float, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """What `url` answers at `path`: JSON if it is, else text. GET, or POST with a body; a status past 299 is an error."""
    connection = connection_to(url, timeout_s, CONNECT_S)
    try:
        connection.connect()
    except OSError as error:
        raise ServerError("unreachable", url, path, _named(error)) from error
    try:
        name = method or ("GET" if body is None else "POST")
        status, data = _exchange(connection, name, urlsplit(url).path + path, body)
    except TimeoutError as error:
        raise ServerError("late", url, path, f"no answer within {round(timeout_s, 1):g} s") from error
    except (OSError, HTTPException) as error:
        raise ServerError("unreachable", url, path, _named(error)) from error
    finally:
        connection.close()
    return _answer(url, path, status, data)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _exchange(connection: HTTPConnection, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
    sent = None if body is None else json.dumps(body).encode()
    connection.request(method, path, sent, {"Content-Type": "application/json"} if sent else {})
    response = connection.getresponse()
    return response.status, response.read()


def _answer(url: str, path: str, status: int, data: bytes) -> Any:
    text = data.decode(errors="replace")
    if status >= 300:
        kind: Kind = "failed" if status >= 500 or status in (408, 429) else "refused"
        raise ServerError(kind, url, path, f"status {status}: {_said(text)}")
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerError("failed", url, path, f"its answer breaks off after {len(data)} bytes") from error


def _said(text: str) -> str:
    """The message in an error's body, in the forms servers write it, or the body."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "detail", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    words = " ".join(str(found).split()) or "no reason given"
    return words if len(words) <= SHOWN else words[:SHOWN] + " ..."
