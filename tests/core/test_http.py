"""A server that sends a byte now and then does not hold its caller beyond the deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config.errors import UserError, is_server_url
from burnish.core.http import connection_to
from burnish.inference.server_client import ServerError
from burnish.inference.vllm.vllm_requests import VLLM
from burnish.rewards.judge_endpoint import JudgeEndpoint, JudgeFailed, RateLimit
from burnish.rewards.judge_options import JudgeOptions

BODY = b'{"choices": [{"message": {"content": "yes"}}]}'
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
GAP_S = 0.05
SLOW_BYTES = 40
"""So many bytes come one by one, in two seconds; then the rest."""


class Trickle:
    """Answers every request; slowly from the byte `slow_from` on."""

    def __init__(self, slow_from: int) -> None:
        self.slow_from = slow_from
        self.bound = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.bound.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.bound.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        answer, slow = HEAD + BODY, self.slow_from
        with connection:
            try:
                asked = connection.makefile("rb")
                size = 0
                while (line := asked.readline().lower()).strip():
                    size = int(line.partition(b":")[2]) if line.startswith(b"content-length:") else size
                asked.read(size)  # what is left unread when a connection is closed resets it
                connection.sendall(answer[:slow])
                for at in range(slow, slow + SLOW_BYTES):
                    time.sleep(GAP_S)
                    connection.sendall(answer[at : at + 1])
                connection.sendall(answer[slow + SLOW_BYTES :])
            except OSError:  # the caller has gone
                return


@pytest.fixture(params=[0, len(HEAD)], ids=["headers", "body"])
def slow(request: pytest.FixtureRequest) -> Iterator[Trickle]:
    server = Trickle(request.param)
    yield server
    server.bound.close()


def judge_call(url: str, path: str, timeout_s: float) -> Any:
    endpoint = JudgeEndpoint(url + path, None, timeout_s, 0, 0.0, RateLimit(None), lambda seconds: False)
    return endpoint.ask({}, time.monotonic() + 60)[0]


@pytest.mark.parametrize(
    ("call", "error", "wanted"),
    [
        (VLLM.call, ServerError, {"choices": [{"message": {"content": "yes"}}]}),
        (judge_call, JudgeFailed, "yes"),
    ],
    ids=["inference server", "judge"],
)
def test_the_deadline_is_that_of_the_whole_request(
    slow: Trickle, call: Callable[..., Any], error: type[Exception], wanted: Any
) -> None:
    with pytest.raises(error, match=r"(?i)no answer within|timed out|deadline|timeout"):
        call(slow.url, "/v1", 0.5)  # ten times the longest pause between two bytes
    assert call(slow.url, "/v1", 60) == wanted


def test_a_request_is_not_begun_after_its_deadline(slow: Trickle, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connection_to(slow.url, 600.0, 60.0)
    connection.connect()
    later = time.monotonic() + 601.0
    monkeypatch.setattr("burnish.core.http.time", SimpleNamespace(monotonic=lambda: later))
    with pytest.raises(TimeoutError):
        connection.request("GET", "/")
    connection.close()


@pytest.mark.parametrize(
    "url", ["http://host:80x0", "http://host:99999", "http://[::1", "http://:80", "ftp://host", "http://a?b=c"]
)
def test_what_is_no_address_is_told_before_anything_is_sent(url: str) -> None:
    assert not is_server_url(url)
    with pytest.raises(UserError, match="is no address of a server; write it as http://host:8000"):
        VLLM.check_url(url)
    with pytest.raises(UserError, match=r"reward\.parts\[0\]: url .* should begin with http:// or https://"):
        JudgeOptions.of({"url": url, "model": "m"}, "reward.parts[0]")
