"""Bodies and texts of any size: their memory is bounded, and nothing that fits is refused."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request

from burnish.gateway.openai_schema import MAX_FIELDS, ApiError, ChatRequest, CompletionRequest, parse_body
from burnish.gateway.request_bodies import (
    LARGE_BODY,
    SMALL_BODY,
    STALL_TIMEOUT_S,
    BodyReader,
    LongestToken,
    TextLimit,
    longest_token,
)
from burnish.models.tokenizer import Tokenizer

HELLO = {"role": "user", "content": "a"}
NUM = 3000
MANY = {f"k{i}": 0 for i in range(NUM)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ChatRequest, {"messages": [0] * NUM}),
        (ChatRequest, {"messages": [HELLO | {"content": [0] * NUM}]}),
        (ChatRequest, {"messages": [HELLO | {"content": 0}] * NUM}),
        (ChatRequest, {"messages": [HELLO | MANY]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [0] * NUM}]}),
        (ChatRequest, {"messages": [HELLO], "tools": [0] * NUM}),
        (ChatRequest, {"messages": [HELLO], "stream": True, "stream_options": MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [0] * NUM}),
        (CompletionRequest, {"prompt": "a", "logit_bias": MANY | {"5": "x"}}),
    ],
)
def test_the_number_of_errors_does_not_grow_with_the_number_of_wrong_values(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "tiny", **options})
    assert caught.value.error_count() <= MAX_FIELDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": [HELLO] * 5000}, "messages: got 5000 messages; expected 4096 at most"),
        ({"messages": [HELLO | {"content": [{"type": "text", "text": ""}] * 9000}] * 2}, "18000 parts together"),
        ({"messages": [HELLO], "tools": [0] * 600}, "tools: got 600 tools; expected 512 at most"),
        ({"messages": [HELLO | MANY]}, "messages[0]: got 3002 fields, among them 'k0', which is not known"),
        ({"messages": [HELLO], **MANY}, "unknown parameter: k0"),
        ({"messages": 3}, "messages: Input should be a valid list"),
        ({"messages": {"a": 1}}, "messages: Input should be a valid list"),
        (
            {"messages": [HELLO], "n": [0] * NUM, "best_of": 2},
            "best_of: this server cannot do that (the engine does not rank",
        ),
    ],
)
def test_too_many_values_are_told_with_their_number(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(ChatRequest, json.dumps({"model": "tiny", **options}).encode())
    assert message in caught.value.message


# --- texts ---------------------------------------------------------------------------------------------------------------

TEXTS = st.text(alphabet=st.sampled_from("the STO \n\u00e9\u0301e\u6f22\U0001f600"), max_size=80) | st.text(max_size=60)


@given(TEXTS)
@example("the" * 40)
@example("<|im_start|>" * 9)
def test_a_text_has_at_least_the_tokens_that_its_length_says(tokenizer: Tokenizer, text: str) -> None:
    assert TextLimit(tokenizer, 5).least_tokens(text) <= len(tokenizer.encode(text))


@given(TEXTS)
@example("<pad>")
def test_a_text_that_fits_is_never_refused_for_its_length(tokenizer: Tokenizer, text: str) -> None:
    num = len(tokenizer.encode(text))
    TextLimit(tokenizer, max(1, num)).check(text, "prompt")
    if num > 1:
        few = TextLimit(tokenizer, max(1, num // 40))
        if len(text) > 50 * max(1, num // 40) * 2:
            with pytest.raises(ApiError, match="positions for a sequence"):
                few.check(text, "prompt")


@pytest.mark.parametrize("is_known", [True, False], ids=["by characters", "by beginnings"])
def test_of_a_text_that_is_far_too_long_only_a_beginning_is_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    encoded: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: encoded.append(len(text)) or encode(text))
    if not is_known:
        monkeypatch.setattr("burnish.gateway.request_bodies.longest_token", lambda _: None)
    with pytest.raises(ApiError) as caught:
        TextLimit(tokenizer, 100).check("the cat " * 100_000, "messages")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "800000 characters" in caught.value.message
    assert sum(encoded) <= (0 if is_known else 2000)


def test_a_token_that_may_stand_for_any_text_gives_no_bound(tokenizer: Tokenizer) -> None:
    assert longest_token(tokenizer) == LongestToken(len("<|im_start|>"), in_bytes=True, is_composed=False)
    assert longest_token(Tokenizer.from_characters("01>")) == LongestToken(len("<pad>"), False, False)
    for change in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel"}]}},
        {"added_tokens": [{"content": "<mask>", "lstrip": True}]},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
        {"model": {"type": "Unigram", "vocab": []}},
    ):
        assert longest_token(_Changed(tokenizer, change)) is None, change
    composed = longest_token(_Changed(tokenizer, {"normalizer": {"type": "NFC"}}))
    assert composed == LongestToken(12, in_bytes=True, is_composed=True)


class _Changed(Tokenizer):
    """A tokenizer whose pipeline differs in some steps."""

    def __init__(self, tokenizer: Tokenizer, change: dict[str, Any]) -> None:
        self._alphabet = None
        self._pipeline = (tokenizer.pipeline() or {}) | change

    def pipeline(self) -> dict[str, Any]:
        return self._pipeline


def test_long_prompts_are_refused_in_the_words_of_short_ones(random_server: Any) -> None:
    client = random_server.client()
    import openai

    for ask in (
        lambda text: client.completions.create(model="tiny", prompt=text),
        lambda text: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}]),
    ):
        with pytest.raises(openai.BadRequestError, match="has 2048 positions") as caught:
            ask("the cat " * 50_000)
        assert caught.value.code == "context_length_exceeded"


# --- bodies --------------------------------------------------------------------------------------------------------------


def request_of(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


def test_large_bodies_are_worked_on_one_at_a_time_and_never_on_the_event_loop() -> None:
    running, most, threads = 0, 0, {}
    both = threading.Event()

    def prepare(body: bytearray) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threads.setdefault(len(body), set()).add(threading.get_ident())
        if len(body) < LARGE_BODY:
            both.set()
        assert both.wait(300)  # a large one works until a small one has been worked on beside it
        running -= 1
        return len(body)

    async def main() -> list[int]:
        bodies = BodyReader(2 * LARGE_BODY)
        large = [asyncio.create_task(bodies.work(request_of(b"x" * LARGE_BODY), prepare)) for _ in range(3)]
        while not running:
            await asyncio.sleep(0.001)
        assert bodies.num_bytes == 3 * LARGE_BODY
        small = [await bodies.work(request_of(b" " * size), prepare) for size in (SMALL_BODY, SMALL_BODY + 1)]
        found = [*await asyncio.gather(*large), *small]
        assert bodies.num_bytes == 0
        return found

    assert asyncio.run(main()) == [LARGE_BODY] * 3 + [SMALL_BODY, SMALL_BODY + 1]
    assert most == 2
    assert threading.get_ident() not in threads[LARGE_BODY] | threads[SMALL_BODY + 1]
    assert threads[SMALL_BODY] == {threading.get_ident()}, "a thread would cost more than the work"


class Clock:
    """A clock that stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_bytes_of_large_bodies_in_work_are_bounded_and_stalled_ones_make_room(start_server: Any) -> None:
    size = 2 * LARGE_BODY
    running = start_server(max_body=size)
    bodies = running.server.api.bodies
    bodies.clock = clock = Clock()
    host, port = running.url.split("/")[2].split(":")

    def send(body: bytes) -> socket.socket:
        """The headers of a body of `size` bytes, and a part of it."""
        connection = socket.create_connection((host, int(port)), timeout=300)
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def answer_to(connection: socket.socket) -> str:
        found = b""
        with connection:
            while part := connection.recv(65536):
                found += part
        return found.decode()

    def ask() -> int:
        answer = running.client().completions.create(model="tiny", prompt=[65], max_tokens=2)
        return answer.usage.completion_tokens

    stalled = send(b" " * (size - 1))
    running.wait_until(lambda: bodies.num_bytes == size - 1)
    assert ask() == 2  # so the event loop has done with the part before the clock moves
    clock.now += STALL_TIMEOUT_S / 2
    others = [send(b" " * (size - 1)) for _ in range(3)]
    running.wait_until(lambda: bodies.num_bytes == 4 * (size - 1))
    assert ask() == 2  # a small body is admitted all the same

    clock.now += STALL_TIMEOUT_S / 2
    answer = answer_to(send(b" " * LARGE_BODY))
    assert answer.startswith("HTTP/1.1 429 ")
    assert f"large requests of {4 * size} bytes are in work" in answer
    running.wait_until(lambda: bodies.num_bytes == 4 * (size - 1))

    clock.now += STALL_TIMEOUT_S / 4
    admitted = send(b" " * LARGE_BODY)
    answer = answer_to(stalled)
    assert answer.startswith("HTTP/1.1 408 ")
    assert "body_too_slow" in answer
    running.wait_until(lambda: bodies.num_bytes == 3 * (size - 1) + LARGE_BODY)
    admitted.sendall(b" " * (size - LARGE_BODY - 2) + b"{}")
    assert admitted.recv(12) == b"HTTP/1.1 400"  # read to its end and parsed
    admitted.close()
    for connection in others:
        connection.close()
    running.wait_until(lambda: bodies.num_bytes == 0)
    assert ask() == 2


def test_a_stalled_body_is_refused_also_if_its_last_part_comes_at_the_same_time() -> None:
    async def main() -> None:
        clock = Clock()
        bodies = BodyReader(LARGE_BODY, clock)
        queues = [asyncio.Queue[dict[str, Any]]() for _ in range(5)]
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        reading = [asyncio.create_task(bodies.work(Request(scope, queue.get), len)) for queue in queues]

        def part(more_body: bool, size: int = LARGE_BODY) -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * size, "more_body": more_body}

        for k, queue in enumerate(queues[:4]):
            clock.now = k
            queue.put_nowait(part(more_body=True))
            while bodies.num_bytes < (k + 1) * LARGE_BODY:
                await asyncio.sleep(0)
        clock.now = STALL_TIMEOUT_S + 0.5
        queues[4].put_nowait(part(more_body=False))
        queues[0].put_nowait(part(more_body=False, size=0))
        with pytest.raises(ApiError) as caught:
            await reading[0]
        assert (caught.value.status, caught.value.code) == (408, "body_too_slow")
        assert await reading[4] == LARGE_BODY
        assert bodies.num_bytes == 3 * LARGE_BODY
        for queue in queues[1:4]:
            queue.put_nowait(part(more_body=False, size=0))
        assert await asyncio.gather(*reading[1:4]) == [LARGE_BODY] * 3
        assert bodies.num_bytes == 0

    asyncio.run(main())
