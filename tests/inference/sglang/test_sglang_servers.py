"""Inspection of a server before a run, and the errors for servers that cannot be used."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.gateway.http_guards import bind_socket
from burnish.inference.server_client import ServerError
from burnish.inference.sglang.sglang_servers import SGLANG, inspect_server
from tests.inference.sglang.fake_sglang_server import SglangServer

Serve = Callable[..., SglangServer]


@pytest.mark.parametrize("renamed", [False, True], ids=["first names", "present names"])
def test_a_server_is_known_by_what_it_does(serve: Serve, renamed: bool) -> None:
    server = serve(version="0.5.6", context=99, memory_saver=False, renamed=renamed)
    facts = inspect_server(server.url, 13)
    assert (facts.version, facts.context, facts.can_sleep) == ("0.5.6", 99, False)
    assert facts.is_tempered
    assert facts.has_mask
    other = inspect_server(serve(original_logprobs=True, mask=False).url, 13)
    assert (other.is_tempered, other.has_mask, other.can_sleep) == (False, False, True)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 50.0], ids=["nearly flat", "usual", "nearly certain"])
def test_temperature_is_seen_whatever_the_model_thinks(tools: Any, serve: Serve, scale: float) -> None:
    for original in (False, True):
        model = tools.decoder()
        model.head_weight.data *= scale
        assert inspect_server(serve(model=model, original_logprobs=original).url, 13).is_tempered is not original


def test_a_server_of_another_model_is_refused_and_lives(serve: Serve) -> None:
    server = serve()
    with pytest.raises(
        UserError,
        match=r"serves another model \(/models/first\): it has no token 13, and the policy has 14 tokens \(status 400: logit_bias",
    ):
        inspect_server(server.url, 14)
    with pytest.raises(UserError, match="it has a token 12, and the policy has 12 tokens"):
        inspect_server(server.url, 12)
    assert inspect_server(server.url, 13)


def test_a_server_that_does_not_label_its_weights_is_too_old(serve: Serve) -> None:
    with pytest.raises(
        UserError, match=r"\(SGLang 0\.4\.6\) is too old: it does not label its weights .* use SGLang 0\.5 or later"
    ):
        inspect_server(serve(version="0.4.6", labels_weights=False).url, 13)


def test_a_server_without_logprobs_is_refused(serve: Serve) -> None:
    with pytest.raises(UserError, match="gives no log-probs"):
        inspect_server(serve(logprobs=False).url, 13)


def test_where_nobody_listens_it_says_how_to_start_a_server() -> None:
    bound = bind_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    bound.close()
    with pytest.raises(
        UserError,
        match=rf"SGLang server {url}, /model_info: no answer \(ConnectionRefusedError.*sglang\.launch_server.*rollout\.sglang\.urls",
    ):
        inspect_server(url, 13)


class _Other(BaseHTTPRequestHandler):
    """Some server that is not SGLang."""

    def do_GET(self) -> None:
        status, body = (404, b"nothing here") if "v1" not in self.path else (200, json.dumps({"ok": True}).encode())
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


def test_another_kind_of_server_is_told_by_its_answers() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Other)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(UserError, match="/get_model_info: status 404: nothing here"):
        inspect_server(url, 13)
    assert SGLANG.call(url, "/v1/models", 5.0) == {"ok": True}
    with pytest.raises(ServerError) as caught:
        SGLANG.call(url, "/other", 5.0)
    assert caught.value.kind == "refused"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "url", ["localhost:30000", "ftp://a:1", "http://", "http://a:port", "http://a:1?x=2", "http://me@a:1"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"rollout\.sglang\.urls: .* write it as http://host:30000"):
        SGLANG.check_url(url)


def test_an_address_may_end_with_a_slash() -> None:
    assert SGLANG.check_url("http://host:30000/") == "http://host:30000"
