"""Clients that connect and send nothing, and bytes that could be read as two requests."""

from __future__ import annotations

import json
import resource
import socket
import threading
from typing import Any

import pytest

from burnish.gateway.http_guards import ConnectionLimits, process_limits

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SHORT = {"model": "tiny", "prompt": [65], "max_tokens": 2}
BODY = json.dumps(SHORT).encode()
WHOLE = HEAD + f"Content-Length: {len(BODY)}\r\nConnection: close\r\n\r\n".encode() + BODY


def connect(running: Any, sent: bytes = b"") -> socket.socket:
    """A connection whose bytes arrive before the server accepts it, so that its time limits do not depend on this process."""
    host, port = running.url.split("/")[2].split(":")
    has_sent = threading.Event()
    running.server._event_loop.call_soon_threadsafe(has_sent.wait, 30)
    try:
        connection = socket.create_connection((host, int(port)), timeout=300)
        connection.sendall(sent)
    finally:
        has_sent.set()
    return connection


def read(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    found = b""
    while part := connection.recv(65536):
        found += part
    connection.close()
    return found


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD[:-7], HEAD + b"Content-Length: 100\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"],
    ids=["nothing", "half of the headers", "half of the body", "half of a chunk"],
)
def test_a_request_that_does_not_come_to_its_end_is_closed_in_time(start_server: Any, sent: bytes) -> None:
    running = start_server(limits=ConnectionLimits(headers_s=0.2, body_s=0.2))
    assert read(connect(running, sent)).startswith(b"HTTP/1.1 408 ")
    running.wait_until(lambda: not running.server.server_state.connections)
    running.wait_until(lambda: running.server.api.bodies.num_bytes == 0)


def test_the_body_of_a_request_that_was_refused_is_not_waited_for_without_end(start_server: Any) -> None:
    running = start_server(limits=ConnectionLimits(body_s=0.2), api_key="sesame-42")
    answer = read(connect(running, HEAD + b"Content-Length: 100\r\n\r\n{"))
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_a_connection_is_closed_in_time_where_the_rest_of_a_body_comes_after_the_refusal(start_server: Any) -> None:
    running = start_server(limits=ConnectionLimits(headers_s=0.2), api_key="sesame-42")
    connection = connect(running, HEAD + b"Content-Length: 2\r\n\r\n{")
    assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
    connection.sendall(b"}")
    assert b"HTTP/1.1 408 " in read(connection)  # the time for the headers of the next request is over


def test_the_second_request_of_a_connection_has_its_own_time(start_server: Any) -> None:
    running = start_server(limits=ConnectionLimits(headers_s=0.2))
    whole = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection = connect(running, whole)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    connection.sendall(whole[:-2])
    assert b"HTTP/1.1 408 " in read(connection)


def test_the_time_of_a_request_ends_when_it_has_come(start_server: Any) -> None:
    running = start_server(limits=ConnectionLimits(headers_s=0.2, body_s=0.2))
    running.model.gate.clear()
    asking = connect(running, WHOLE)
    running.wait_until(lambda: running.loop.num_unfinished == 1)
    assert read(connect(running)).startswith(b"HTTP/1.1 408 ")  # the time of a later connection is over
    running.model.gate.set()
    assert read(asking).startswith(b"HTTP/1.1 200 ")


def test_idle_connections_make_room_for_those_that_ask(start_server: Any) -> None:
    running = start_server(limits=ConnectionLimits(most=20))
    held = [connect(running) for _ in range(60)]
    running.wait_until(lambda: len(running.server.server_state.connections) == 20)
    assert running.client().completions.create(**SHORT).usage.completion_tokens == 2
    assert held[0].recv(100).startswith(b"HTTP/1.1 408 ")  # the oldest first
    for connection in held:
        connection.close()


@pytest.mark.parametrize(("files", "most"), [(1024, 896), (100, 16), (10**6, 4096), (resource.RLIM_INFINITY, 4096)])
def test_there_are_fewer_connections_than_the_process_may_open_files(
    monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert process_limits().most == most


def test_connections_that_are_being_answered_are_not_closed_for_new_ones(start_server: Any) -> None:
    running = start_server(limits=ConnectionLimits(most=3), max_rows=3)
    running.model.gate.clear()
    asking = [connect(running, WHOLE) for _ in range(3)]
    running.wait_until(lambda: running.loop.num_unfinished == 3)
    assert read(connect(running)).startswith(b"HTTP/1.1 503 ")
    running.model.gate.set()
    assert all(read(connection).startswith(b"HTTP/1.1 200 ") for connection in asking)


def test_two_lengths_of_a_body_are_refused_and_end_the_connection(random_server: Any) -> None:
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lengths = f"Content-Length: {len(inner) + 5}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    answer = read(connect(random_server, HEAD + lengths + b"0\r\n\r\n" + inner))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"ambiguous_length" in answer
    assert answer.count(b"HTTP/1.1") == 1
