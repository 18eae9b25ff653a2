"""One HTTP call of a vLLM server, with a deadline."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from burnish.config.errors import UserError
from burnish.core.http import connection_to, is_server_url

CONNECT_S = 10.0
SHOWN = 400
"""Characters of a server's own words in an error."""


class ServerError(UserError):
    """A server did not do what it was asked; the text says which, what it was asked, and what came of it."""

    def __init__(self, url: str, path: str, what: str, status: int | None = None) -> None:
        super().__init__(f"vLLM server {url}, {path}: {what}")
        self.status = status
        """Of its answer; None where there was none."""


def check_url(url: str) -> str:
    """The address of a server, without a slash at its end."""
    if not is_server_url(url):
        raise UserError(
            f"rollout.vllm.url: {url!r} is no address of a server; write it as http://host:8000, with a number for the port"
        )
    return url.rstrip("/")


def call(url: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
    """What a server answers at a path within `timeout_s` in all: JSON if it is, else text. GET, or POST with a body."""
    connection = connection_to(url, timeout_s, CONNECT_S)
    try:
        connection.connect()
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if sent is not None else {}
        connection.request("GET" if sent is None else "POST", urlsplit(url).path + path, sent, headers)
        response = connection.getresponse()
        status, data = response.status, response.read()
    except TimeoutError as error:
        raise ServerError(url, path, f"no answer within {timeout_s:g} s") from error
    except (OSError, HTTPException) as error:
        raise ServerError(url, path, f"no answer ({type(error).__name__}: {error})") from error
    finally:
        connection.close()
    text = data.decode(errors="replace")
    if status >= 300:
        raise ServerError(url, path, f"status {status}: {_said(text)}", status)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _said(text: str) -> str:
    """The message in an error's body, or the body."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    words = " ".join(str(found).split()) or "no reason given"
    return words if len(words) <= SHOWN else words[:SHOWN] + " ..."
