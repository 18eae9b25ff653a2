"""Routes about the server and its tokenizer: models, health, metrics, tokenize, detokenize."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

SHORT = {"model": "tiny", "prompt": [65, 66], "max_tokens": 2}


def ask(running: Any, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, str, Any]:
    """Status, text and headers."""
    connection = http.client.HTTPConnection(running.url.split("/")[2], timeout=300)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def values(text: str) -> dict[str, float]:
    """The samples of a page of metrics; each has a type and a help text before it."""
    found: dict[str, float] = {}
    described: dict[str, set[str]] = {"HELP": set(), "TYPE": set()}
    for line in text.splitlines():
        if line.startswith("# "):
            _, kind, name, _ = line.split(" ", 3)
            described[kind].add(name)
        else:
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
            assert name.partition("{")[0] in described["HELP"] & described["TYPE"]
    return found


def test_health_needs_no_key_and_ends_with_the_engine(start_server: Any) -> None:
    running = start_server(api_key="sesame-42")
    assert ask(running, "GET", "/health")[:2] == (200, '{"status":"ok"}')
    assert ask(running, "GET", "/metrics")[0] == 401
    running.loop.close()
    assert ask(running, "GET", "/health")[0] == 503


def test_metrics_count_requests_tokens_errors_and_what_runs(start_server: Any) -> None:
    running = start_server(max_rows=1, api_key="sesame-42")
    key = "sesame-42"
    assert ask(running, "POST", "/v1/completions", SHORT | {"n": 2}, key)[0] == 200
    assert ask(running, "POST", "/v1/completions", SHORT | {"n": 0}, key)[0] == 400
    assert ask(running, "GET", "/strange", None, key)[0] == 404
    assert ask(running, "GET", "/strange")[0] == 401
    running.model.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, running, "POST", "/v1/completions", SHORT | {"n": 3}, key)
        running.wait_until(lambda: running.loop.num_waiting == 2)
        status, text, headers = ask(running, "GET", "/metrics", None, key)
        running.model.gate.set()
        assert asking.result()[0] == 200
    found = values(text)
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert found == found | {
        'burnish_requests_total{path="/v1/completions",status="200"}': 1,
        'burnish_requests_total{path="/v1/completions",status="400"}': 1,
        'burnish_requests_total{path="other",status="404"}': 1,
        'burnish_requests_total{path="other",status="401"}': 1,
        'burnish_request_errors_total{type="client"}': 3,
        'burnish_request_errors_total{type="server"}': 0,
        "burnish_prompt_tokens_total": 4,
        "burnish_completion_tokens_total": 4,
        'burnish_completions_total{finish="length"}': 2,
        "burnish_completions_running": 1,
        "burnish_completions_waiting": 2,
        "burnish_requests_left_total": 0,
    }
    running.wait_until(running.is_idle)
    later = values(ask(running, "GET", "/metrics", None, key)[1])
    assert (later["burnish_completion_tokens_total"], later["burnish_completions_running"]) == (10, 0)


def test_texts_and_dialogues_are_tokenised_and_back(random_server: Any) -> None:
    tokenizer = random_server.tokenizer
    status, text, _ = ask(random_server, "POST", "/tokenize", {"prompt": "the é", "return_token_strs": True})
    found = json.loads(text)
    tokens = tokenizer.encode("the é", special=True)
    assert (status, found["count"], found["tokens"], found["max_model_len"]) == (200, len(tokens), tokens, 2048)
    assert "".join(found["token_strs"]) == "the é"
    assert json.loads(ask(random_server, "POST", "/detokenize", {"tokens": tokens})[1]) == {"prompt": "the é"}
    dialogue = [{"role": "user", "content": "a"}]
    found = json.loads(ask(random_server, "POST", "/tokenize", {"model": "tiny", "messages": dialogue})[1])
    assert found["tokens"] == tokenizer.chat(dialogue)
    shown = json.loads(ask(random_server, "POST", "/detokenize", {"tokens": found["tokens"]})[1])["prompt"]
    assert shown == tokenizer.chat_text(dialogue)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "the cat " * 5000}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0]"),
        ("/tokenize", {"prompt": "a", "n": 1}, 400, "n"),
        ("/detokenize", {"tokens": [5, 263]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
def test_what_cannot_be_tokenised_is_refused_by_name(
    random_server: Any, path: str, body: Any, status: int, param: str
) -> None:
    found, text, _ = ask(random_server, "POST", path, body)
    assert (found, json.loads(text)["error"]["param"]) == (status, param)
