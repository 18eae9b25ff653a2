"""Servers that fail, hang, break connections, die or restart with other weights: requests are recovered, or the error names the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.core.engine import Request
from burnish.inference.sglang.sglang_engine import SglangEngine
from burnish.inference.sglang.sglang_requests import sampling_seed
from burnish.models.weight_files import hf_tensors
from tests.inference.sglang.fake_sglang_server import SglangServer, all_logits

Serve = Callable[..., SglangServer]
Connect = Callable[..., SglangEngine]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between retries."""
    monkeypatch.setattr("burnish.inference.sglang.sglang_requests.RETRY_WAIT_S", 0.02)
    monkeypatch.setattr("burnish.inference.sglang.sglang_servers.LOST_AFTER_S", 0.5)


def drawn(tools: Any, server: SglangServer, request: Request) -> list[int]:
    served = replace(request, key=sampling_seed(request), generated=len(request.tokens))
    return tools.reference(lambda tokens: all_logits(server.model, tokens)[-1], served)[0]


def asked(server: SglangServer) -> list[Any]:
    """The bodies of its requests, without those of the inspection."""
    return [body for path, body in server.calls if path == "/generate" and "rid" in body]


@pytest.mark.parametrize("fault", ["500", "503", "cut"])
def test_a_call_that_fails_is_made_again(tools: Any, serve: Serve, connect: Connect, fault: str) -> None:
    server = serve()
    engine = connect(server)
    (request,) = tools.requests([(3, 4)])
    server.faults.extend([fault, fault])
    (found,) = tools.run(engine, [request]).values()
    assert found.tokens.tolist() == drawn(tools, server, request)
    bodies = asked(server)
    assert len({body["rid"] for body in bodies}) == len(bodies) == 3


def test_a_server_that_only_fails_is_named_with_the_request_and_its_words(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server = serve()
    engine = connect(server)
    server.faults.extend(["500"] * 4)
    first, second = tools.requests([(3, 4)], 2)
    engine.submit([first])
    words = (
        rf"request 0\.0: SGLang server {server.url}, /generate: status 500: a fault of the kind 500 \(tried 4 times\)"
    )
    with pytest.raises(UserError, match=words):
        list(engine.stream())
    assert tools.run(engine, [first, second]).keys() == {"0.0", "0.1"}, "it is asked again for others"


def test_what_a_server_refuses_is_not_asked_again(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    server.faults.append("400")
    engine.submit(tools.requests([(3, 4)]))
    with pytest.raises(UserError, match=r"request 0\.0: SGLang server .* status 400: a fault of the kind 400$"):
        list(engine.stream())
    assert len(asked(server)) == 1


def test_an_answer_without_logprobs_is_an_error(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    server.faults.append("bare")
    engine.submit(tools.requests([(3, 4)]))
    with pytest.raises(UserError, match=r"request 0\.0: .* no log-probs \(meta_info\.output_token_logprobs\)"):
        list(engine.stream())


def test_a_server_that_hangs_past_the_deadline_is_named_and_told_to_stop(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server = serve()
    engine = connect(server, timeout_s=1.0)
    server.faults.append("hang")
    fast, slow = tools.requests([(3, 4)], 2, max_tokens=4)
    engine.submit([slow])
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"request 0\.1: SGLang server {server.url}, /generate: no answer within 1 s"):
        list(engine.stream())
    assert time.monotonic() - started < 5
    (body,) = asked(server)
    assert ("/abort_request", {"rid": body["rid"]}) in server.calls
    assert tools.run(engine, [fast])


def test_one_that_somebody_else_aborts_goes_on_where_it_was(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    server.behaviour.delay_s = 0.002
    server.faults.extend(["abort", "abort"])
    (request,) = tools.requests([(3, 4)], max_tokens=40, temperature=0.8)
    (found,) = tools.run(engine, [request]).values()
    assert (found.tokens.tolist(), found.finish) == (drawn(tools, server, request), "length")
    lengths = [len(body["input_ids"]) for body in asked(server)]
    assert lengths[0] == 2
    assert lengths == sorted(set(lengths)), "each call begins with the tokens of those before"


# --- servers that are lost -----------------------------------------------------------------------------------------------


def test_a_killed_server_is_named_before_the_deadline_of_its_requests(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server = serve()
    engine = connect(server)
    server.behaviour.delay_s = 0.05
    engine.submit(tools.requests([(3, 4)], 3, max_tokens=100))
    while len(server.running) < 3:
        time.sleep(0.01)
    started = time.monotonic()
    server.kill()
    with pytest.raises(
        UserError,
        match=rf"no SGLang server is left \({server.url}: no answer \(ConnectionRefusedError.*start it again, and resume",
    ):
        list(engine.stream())
    assert time.monotonic() - started < engine.timeout_s


def test_the_requests_of_a_killed_server_are_done_by_another(tools: Any, serve: Serve, connect: Connect) -> None:
    first, second = serve(), serve()
    engine = connect(first, second)
    first.behaviour.delay_s = second.behaviour.delay_s = 0.01
    wanted = tools.requests([(3, 4)], 6, max_tokens=20)
    engine.submit(wanted)
    while not (first.running and second.running):
        time.sleep(0.002)
    first.kill()
    found = {c.id: c.tokens.tolist() for c in engine.stream()}
    assert found == {r.id: drawn(tools, second, r) for r in wanted}, "none lost, none twice, none changed"


def test_a_restarted_server_is_not_used_before_it_has_the_weights(
    tools: Any, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise it would sample from the weights of its start without notice."""
    trained = tools.decoder(seed=5)
    first, second = serve(seed=1), serve(seed=2)
    engine = connect(first, second)
    engine.load(3, hf_tensors(trained))
    first.kill()
    again = serve(seed=1, port=first.port)
    wanted = tools.requests([(3, 4)], 6)
    found = tools.run(engine, wanted)
    assert {c.version for c in found.values()} == {3}
    assert {k: c.tokens.tolist() for k, c in found.items()} == {r.id: drawn(tools, second, r) for r in wanted}
    assert engine.servers == [engine.pool.servers[1].info]
    assert f"SGLang server {again.url} is lost (it has weights 'default' where" in caplog.text
    engine.load(4, hf_tensors(trained))
    assert len(engine.servers) == 2, "with the weights it is one of them again"
    assert tools.run(engine, wanted).keys() == {r.id for r in wanted}
    assert len(asked(again)) > 1


def test_the_only_server_restarted_with_other_weights_is_an_error(tools: Any, serve: Serve, connect: Connect) -> None:
    first = serve(seed=1)
    engine = connect(first)
    engine.load(3, hf_tensors(tools.decoder(seed=5)))
    first.kill()
    serve(seed=1, port=first.port)
    engine.submit(tools.requests([(3, 4)]))
    with pytest.raises(
        UserError,
        match=r"no SGLang server is left .*it has weights 'default' where '\w+-3' were sent: it was restarted",
    ):
        list(engine.stream())
