"""API keys, limits, clients that disconnect, an engine that fails: nothing hangs and nothing keeps running."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

LONG = {"model": "tiny", "prompt": [65], "max_tokens": 100_000, "temperature": 0}
SHORT = {"model": "tiny", "prompt": [65], "max_tokens": 2}


def test_a_client_that_leaves_a_stream_frees_the_engine(script_server: Any) -> None:
    stream = script_server.client().completions.create(**LONG, n=3, stream=True)
    next(iter(stream))
    assert len(script_server.engine.rows) == 3
    stream.close()
    script_server.wait_until(script_server.is_idle)
    script_server.wait_until(lambda: "client left" in script_server.log[-1])
    assert "none finished" in script_server.log[-1]
    assert script_server.client().completions.create(**SHORT).choices[0].finish_reason == "length"


def ask_and_leave(running: Any, while_waiting: Callable[[], bool], **body: Any) -> None:
    """Send a request without reading the answer, and disconnect when a condition holds."""
    connection = http.client.HTTPConnection(running.url.split("/")[2], timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    running.wait_until(while_waiting)
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_frees_the_engine(script_server: Any, stream: bool) -> None:
    script_server.model.gate.clear()
    ask_and_leave(script_server, lambda: script_server.loop.num_unfinished == 1, **LONG, stream=stream)
    script_server.wait_until(lambda: "499" in script_server.log[-1])
    assert script_server.loop.num_unfinished == 1  # the engine is in the middle of a step
    script_server.model.gate.set()
    script_server.wait_until(script_server.is_idle)


def test_a_request_that_waits_can_be_left_too(start_server: Any) -> None:
    running = start_server(max_rows=1)
    stream = running.client().completions.create(**LONG, stream=True)
    next(iter(stream))
    ask_and_leave(running, lambda: len(running.engine.waiting) == 1, **SHORT)
    running.wait_until(lambda: running.loop.num_unfinished == 1)
    assert len(running.engine.rows) == 1
    assert not running.engine.waiting
    stream.close()
    running.wait_until(running.is_idle)


def test_leaving_one_of_several_keeps_the_others_exact(random_server: Any) -> None:
    client = random_server.client()
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 300, "seed": 6}
    alone = client.completions.create(**asked).choices[0].text
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(client.completions.create, **asked) for _ in range(2)]
        for _ in range(4):
            stream = client.completions.create(**(asked | {"seed": 1, "max_tokens": 1000}), stream=True)
            next(iter(stream))
            stream.close()
        assert [other.result().choices[0].text for other in others] == [alone, alone]
    random_server.wait_until(random_server.is_idle)


def test_a_full_queue_is_429_with_a_time_to_come_back(start_server: Any) -> None:
    running = start_server(max_rows=1, max_queue=1)
    running.model.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(running.client().completions.create, **SHORT) for _ in range(2)]
        running.wait_until(lambda: running.loop.num_unfinished == 2)
        with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
            running.client().completions.create(**SHORT)
        assert caught.value.response.headers["Retry-After"] == "1"
        assert caught.value.code == "queue_full"
        patient = pool.submit(running.client(max_retries=5).completions.create, **SHORT)
        running.model.gate.set()
        assert [w.result().choices[0].finish_reason for w in [*waiting, patient]] == ["length"] * 3


def test_a_large_body_is_413(start_server: Any) -> None:
    running = start_server(max_body=1000)
    for size in (2000, 5_000_000):
        with pytest.raises(openai.APIStatusError, match="larger than the 1000 bytes") as caught:
            running.client().completions.create(**(SHORT | {"prompt": "a" * size}))
        assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    assert running.client().completions.create(**SHORT).usage.completion_tokens == 2


def test_the_server_may_allow_fewer_tokens(start_server: Any) -> None:
    client = start_server(max_tokens=3).client()
    with pytest.raises(openai.BadRequestError, match="allows 3 new tokens"):
        client.completions.create(**(SHORT | {"max_tokens": 4}))
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    assert chat.usage.completion_tokens == 3


def test_a_number_beyond_all_tokens_is_no_limit_and_disturbs_nobody(random_server: Any) -> None:
    wanted = {"model": "tiny", "prompt": [65], "max_tokens": 4, "seed": 5}
    plain = random_server.client().completions.create(**wanted)
    for top_k in (2**31, 2**63, 10**30):
        answer = random_server.client().completions.create(**wanted, extra_body={"top_k": top_k})
        assert answer.choices[0].text == plain.choices[0].text


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:1", 200), ("[::1]:5", 200), ("evil.example", 403), ("127.evil.example", 403)],
)  # fmt: skip
def test_without_a_key_a_server_of_this_machine_answers_to_no_other_name(
    random_server: Any, host: str, status: int
) -> None:
    """DNS rebinding: a web page under a name that resolves to this machine."""
    connection = http.client.HTTPConnection(random_server.url.split("/")[2], timeout=300)
    connection.request("GET", "/v1/models", headers={"Host": host})
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    assert answer.status == status
    if status == 403:
        assert body["error"]["code"] == "unknown_host"
        assert "--api-key" in body["error"]["message"]


def test_with_a_key_a_server_answers_to_any_name(start_server: Any) -> None:
    running = start_server(api_key="sesame-42")
    connection = http.client.HTTPConnection(running.url.split("/")[2], timeout=300)
    connection.request("GET", "/v1/models", headers={"Host": "proxy.example", "Authorization": "Bearer sesame-42"})
    assert connection.getresponse().status == 200
    connection.close()


def test_a_key_is_asked_for_where_one_is_set(start_server: Any) -> None:
    running = start_server(api_key="sesame-42")
    for header in ("Bearer sesame", "Bearer sesame-421", "Bearer", "sesame-42", "Basic sesame-42", "Bearer cl\xe9"):
        connection = http.client.HTTPConnection(running.url.split("/")[2], timeout=300)
        connection.request("GET", "/v1/models", headers={"Authorization": header})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.loads(answer.read())["error"]["code"] == "invalid_api_key"
        connection.close()
    with pytest.raises(openai.AuthenticationError):
        running.client().completions.create(**SHORT)
    assert running.client(api_key="sesame-42").completions.create(**SHORT).usage.completion_tokens == 2
    assert not any("sesame" in line for line in running.log)


def test_an_engine_that_fails_answers_everyone_and_ends_the_server(start_server: Any) -> None:
    running = start_server(max_rows=2)
    client = running.client()
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(client.completions.create, **LONG) for _ in range(3)]
        running.wait_until(lambda: running.loop.num_unfinished == 4)
        running.model.fail = True
        for other in waiting:
            with pytest.raises(openai.InternalServerError, match="log says why"):
                other.result()
    with pytest.raises(openai.APIError, match="log says why"):
        list(stream)
    assert isinstance(running.loop.failure.__cause__, ZeroDivisionError)
    running.wait_until(lambda: running.server.should_exit)
    assert running.loop.num_unfinished == 0


def test_stopping_lets_running_requests_finish(start_server: Any) -> None:
    running = start_server()
    running.model.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(running.client().completions.create, **SHORT)
        running.wait_until(lambda: running.loop.num_unfinished == 1)
        running.server.stop()
        running.wait_until(lambda: any(line.startswith("stopping") for line in running.log))
        running.model.gate.set()
        assert waiting.result().choices[0].finish_reason == "length"


def test_requests_that_take_too_long_to_finish_are_told_why(start_server: Any) -> None:
    running = start_server(grace_s=0)
    stream = running.client().completions.create(**LONG, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(running.client().completions.create, **LONG)
        running.wait_until(lambda: running.loop.num_unfinished == 2)
        running.server.stop()
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            waiting.result()
    assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    running.wait_until(running.is_idle)


def test_the_log_has_a_line_a_request(start_server: Any) -> None:
    running = start_server()
    client = running.client()
    client.completions.create(**SHORT, n=2)
    list(client.completions.create(**SHORT, stream=True))
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a\nb\x1b[31m")
    running.wait_until(lambda: len(running.log) == 4)
    lines = [line.split("  ", 1)[1] for line in running.log[1:]]
    assert lines[0].startswith("POST  /v1/completions  200  0.")
    assert lines[0].endswith("1 + 4 tokens, 2 length")
    assert lines[1].endswith("1 + 2 tokens, 1 length")
    assert lines[2].startswith("GET  /v1/models/a%0Ab%1B%5B31m  404")
    assert all(line.isprintable() for line in lines)
    time.strptime(running.log[1].split("  ")[0], "%H:%M:%S")
