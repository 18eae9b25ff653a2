"""The HTTP retriever, against a server that speaks Search-R1's protocol."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.tools import search_http
from burnish.environments.tools.search_http import SearchFailed, SearchHTTP


class Retriever(BaseHTTPRequestHandler):
    """Answers each query with documents that repeat it. Statuses in `fails` are sent first."""

    fails: list[int]
    requests: list[dict[str, Any]]
    garbage: bytes | None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        status = self.fails.pop(0) if self.fails else 200
        found = [
            [
                {"document": {"id": n, "contents": f'"{q}"\ntext {n}'}, "score": 1.0 / (n + 1)}
                for n in range(body["topk"])
            ]
            for q in body["queries"]
        ]
        data = json.dumps({"result": found}).encode() if self.garbage is None else self.garbage
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[Retriever], str]]:
    handler = type("Handler", (Retriever,), {"fails": [], "requests": [], "garbage": None})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield handler, f"http://127.0.0.1:{http.server_address[1]}/retrieve"
        http.shutdown()
        thread.join()


def test_calls_that_arrive_together_are_one_request(server: tuple[type[Retriever], str]) -> None:
    handler, url = server

    async def ask() -> list[Any]:
        tool = SearchHTTP(url, top_k=2, max_batch=3, batch_window_s=0.05)
        return await asyncio.gather(*(tool.call({"query": f"q{n}"}) for n in range(5)))

    texts = asyncio.run(ask())
    assert texts == [f'Doc 1(Title: "q{n}") text 0\nDoc 2(Title: "q{n}") text 1' for n in range(5)]
    assert sorted(len(request["queries"]) for request in handler.requests) == [2, 3]
    assert all(request["topk"] == 2 and request["return_scores"] is True for request in handler.requests)


def test_a_busy_server_is_asked_again(server: tuple[type[Retriever], str], monkeypatch: pytest.MonkeyPatch) -> None:
    handler, url = server
    monkeypatch.setattr(search_http, "FIRST_WAIT_S", 0.001)
    handler.fails = [503, 429]
    text = asyncio.run(SearchHTTP(url, top_k=1, format="{title}: {text} ({score})").call({"query": "x"}))
    assert text == '"x": text 0 (1.0)'
    assert len(handler.requests) == 3


@pytest.mark.parametrize(
    ("fails", "garbage", "message", "num_requests"),
    [
        ([404], None, "answered 404", 1),
        ([500, 500], None, "answered 500", 2),
        ([], b"<html>", "does not speak Search-R1's protocol", 1),
        ([], b'{"result": []}', "0 results for 1 queries", 1),
        ([], b'{"result": [[{"document": {"name": 1}}]]}', "a document has `text`", 1),
    ],
)
def test_a_retriever_that_does_not_answer_raises(
    server: tuple[type[Retriever], str],
    monkeypatch: pytest.MonkeyPatch,
    fails: list[int],
    garbage: bytes | None,
    message: str,
    num_requests: int,
) -> None:
    handler, url = server
    monkeypatch.setattr(search_http, "FIRST_WAIT_S", 0.001)
    handler.fails, handler.garbage = fails, garbage
    with pytest.raises(SearchFailed, match=message):
        asyncio.run(SearchHTTP(url, retries=1).call({"query": "x"}))
    assert len(handler.requests) == num_requests


def test_a_server_that_is_not_there_raises_and_other_calls_go_on() -> None:
    with pytest.raises(SearchFailed, match="Connection refused"):
        asyncio.run(SearchHTTP("http://127.0.0.1:9/retrieve", retries=0).call({"query": "x"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "url must be like"),
        ({"url": "http://h/r", "top_k": 0}, "top_k"),
        ({"url": "http://h/r", "format": "{titel}"}, "its fields are"),
        ({"url": "http://h/r", "format": "{title}"}, "does not show {text}"),
        ({"url": "http://h/r", "timeout_s": 0}, "timeout_s"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SearchHTTP(**options)
