"""The engine on SGLang servers: tokens, log-probs, finish reasons, order, interrupts and aborts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.sglang.sglang_engine import SglangEngine
from burnish.inference.sglang.sglang_requests import sampling_seed
from tests.inference.sglang.fake_sglang_server import SglangServer, all_logits

Serve = Callable[..., SglangServer]
Connect = Callable[..., SglangEngine]
PROMPTS = [(3, 4, 5), (9,), (2, 2, 7, 1, 8, 11)]


def as_served(request: Request) -> Request:
    """The request as the fake server draws it: with its seed, and noise by the position in the sequence."""
    return replace(request, key=sampling_seed(request), generated=len(request.tokens))


def expected(tools: Any, server: SglangServer, request: Request) -> tuple[list[int], list[float], str]:
    return tools.reference(lambda tokens: all_logits(server.model, tokens)[-1], as_served(request))


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


# --- tokens and log-probs ------------------------------------------------------------------------------------------------


OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.7}, {"temperature": 1.6, "stop_tokens": (1, 5)}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.6},
    {"min_p": 0.2, "temperature": 1.3}, {"top_k": 6, "temperature": 1.2, "stop_tokens": (2,)}, {"top_k": 1},
    {"logit_bias": ((5, 3.0), (0, -100.0)), "temperature": 0.8}, {"logit_bias": ((2, 1.5),), "top_k": 3},
]  # fmt: skip


def test_tokens_and_logprobs_are_those_of_the_distribution_drawn_from(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server = serve()
    wanted = [
        replace(request, id=f"{options} {request.id}")
        for options in OPTIONS
        for request in tools.requests(PROMPTS[:2], max_tokens=9, **options)
    ]
    found = tools.run(connect(server), wanted)
    for request in wanted:
        tokens, logp, finish = expected(tools, server, request)
        assert found[request.id].tokens.tolist() == tokens, request.id
        assert found[request.id].finish == finish
        np.testing.assert_allclose(found[request.id].logp, np.float32(logp), rtol=1e-6, atol=1e-7)


def test_a_greedy_token_has_the_logprob_of_the_whole_distribution(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve()
    plain, cut = (tools.requests([(3, 4)], temperature=0.0, **options) for options in ({}, {"top_k": 3, "top_p": 0.5}))
    first, second = (tools.run(connect(server), wanted)["0.0"] for wanted in (plain, cut))
    assert first.tokens.tolist() == second.tokens.tolist() == expected(tools, server, plain[0])[0]
    assert first.logp.tolist() == second.logp.tolist()
    np.testing.assert_allclose(first.logp, np.float32(expected(tools, server, plain[0])[1]), rtol=1e-6)


def test_logprobs_are_the_learners(tools: Any, serve: Serve, connect: Connect) -> None:
    server, temperature = serve(model=tools.decoder(torch.float32)), 0.6
    wanted = tools.requests(PROMPTS, 2, temperature=temperature, max_tokens=30)
    found = tools.run(connect(server), wanted)
    for request in wanted:
        tokens = torch.tensor([*request.tokens, *found[request.id].tokens.tolist()])
        places = torch.arange(len(request.tokens), len(tokens))
        with torch.no_grad():
            logp, _ = server.model.token_logprobs(tokens, torch.tensor([0, len(tokens)]), places, temperature)
        np.testing.assert_allclose(found[request.id].logp, logp.numpy(), atol=2e-6)


def test_no_parameter_is_left_to_the_servers_preferences(tools: Any, serve: Serve, connect: Connect) -> None:
    """Penalties would fail an assertion of the fake server; a preferred temperature or top-k would change the tokens."""
    odd = {"temperature": 0.2, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "repetition_penalty": 1.3, "min_new_tokens": 5}
    server = serve()
    wanted = tools.requests(PROMPTS, 2, top_k=5)
    plain = tools.run(connect(server), wanted)
    server.behaviour.preferred = odd | {"frequency_penalty": 0.4, "presence_penalty": 0.4}
    again = tools.run(connect(server), wanted)
    assert {k: c.tokens.tolist() for k, c in plain.items()} == {k: c.tokens.tolist() for k, c in again.items()}


def test_every_sample_of_a_prompt_has_a_seed_of_its_own(tools: Any, serve: Serve, connect: Connect) -> None:
    """A server with --enable-deterministic-inference draws the same for all requests that name none."""
    server = serve()
    found = tools.run(connect(server), tools.requests([(3, 4)], 6, max_tokens=20))
    assert len({tuple(c.tokens.tolist()) for c in found.values()}) == 6
    bodies = [body for path, body in server.calls if path == "/generate" and body.get("rid")]
    assert all(0 <= body["sampling_params"]["sampling_seed"] < 2**31 for body in bodies)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_raw_logprobs_are_scored_where_they_are_not_those_of_the_draw(
    tools: Any, serve: Serve, connect: Connect, num_calls: int
) -> None:
    server = serve()
    engine = connect(server)
    server.calls.clear()
    options: dict[str, Any] = {} if num_calls == 1 else {"temperature": 0.5, "top_k": 4, "logit_bias": ((3, 1.0),)}
    (request,) = tools.requests([(3, 4)], raw_logprobs=True, **options)
    (found,) = tools.run(engine, [request]).values()
    tokens = found.tokens.tolist()
    logits = all_logits(server.model, [3, 4, *tokens])[1:-1]
    raw = [float(row[token]) for row, token in zip(logits.log_softmax(-1), tokens, strict=True)]
    assert found.raw_logp is not None
    np.testing.assert_allclose(found.raw_logp, np.float32(raw), rtol=1e-6)
    assert len(server.calls) == num_calls


# --- ends ----------------------------------------------------------------------------------------------------------------


def test_a_completion_ends_at_a_stop_token_a_stop_string_or_the_limit(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server = serve(model=tools.successor(13))
    sampling = SamplingOptions(max_tokens=6)
    found = tools.run(
        connect(server),
        [
            Request("token", (3,), replace(sampling, stop_tokens=(6,)), 1),
            Request("string", (3,), replace(sampling, stop=("fg", "zz")), 2),
            Request("limit", (3,), sampling, 3),
            Request("token at the limit", (3,), replace(sampling, stop_tokens=(9,)), 4),
            Request("string at the limit", (3,), replace(sampling, stop=("ij",)), 5),
        ],
    )
    ends = {name: (c.tokens.tolist(), c.finish) for name, c in found.items()}
    assert ends == {
        "token": ([4, 5, 6], "stop"),
        "string": ([4, 5, 6], "stop"),
        "limit": ([4, 5, 6, 7, 8, 9], "length"),
        "token at the limit": ([4, 5, 6, 7, 8, 9], "stop"),
        "string at the limit": ([4, 5, 6, 7, 8, 9], "stop"),
    }


@pytest.mark.parametrize("stop_tokens", [(), (9,)], ids=["none", "another"])
def test_an_end_token_of_the_model_ends_only_those_that_name_it(
    tools: Any, serve: Serve, connect: Connect, stop_tokens: tuple[int, ...]
) -> None:
    server = serve(model=tools.successor(13), eos=(5, 7))
    wanted = tools.requests([(3,)], stop_tokens=stop_tokens, max_tokens=8)
    (found,) = tools.run(connect(server), wanted).values()
    assert found.tokens.tolist() == ([4, 5, 6, 7, 8, 9] if stop_tokens else list(range(4, 12)))
    assert found.finish == ("stop" if stop_tokens else "length")


def test_a_server_that_cuts_a_completion_short_is_an_error(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve(longest=10)
    engine = connect(server)
    engine.submit(tools.requests([(3, 4)], max_tokens=12))
    with pytest.raises(
        UserError, match=rf"request 0\.0: SGLang server {server.url} ended it after 8 of 12 tokens; .*--context-length"
    ):
        list(engine.stream())


# --- refusals ------------------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_run_is_refused_at_once(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve(context=20)
    engine = connect(server)
    sampling = SamplingOptions(max_tokens=4)
    for request, words in (
        (Request("a", (), sampling, 1), "the prompt has no tokens"),
        (Request("a", (3, 13), sampling, 1), "token 13 is not one of the model's, 0 to 12"),
        (Request("a", (3, -1), sampling, 1), "token -1 is not one"),
        (
            Request("a", (3,) * 15, sampling, 1),
            "15 prompt tokens [+] 4 new ones = 19, but SGLang server .* has 20 positions, 2 of which it leaves free",
        ),
        (
            Request("a", (3,) * 14, SamplingOptions(max_tokens=1), 1),
            "takes 13 positions of a prompt at most, and this needs 14",
        ),
        (
            Request("a", (3,) * 10, replace(sampling, raw_logprobs=True, temperature=0.5), 1),
            "takes 13 positions of a prompt at most, and this needs 14",
        ),
        (Request("a", (3,), replace(sampling, logit_bias=((13, 1.0),)), 1), "logit_bias names token 13"),
    ):
        with pytest.raises(UserError, match=words):
            engine.submit([request])
    engine.submit([Request("a", (3,) * 13, sampling, 1)])
    with pytest.raises(ValueError, match="request a is already running"):
        engine.submit([Request("a", (3,), sampling, 1)])
    assert [c.id for c in engine.stream()] == ["a"]
    assert server.port, "and the server lives: no token past the vocabulary reached it"


def test_truncation_is_refused_where_a_server_cannot_say_its_logprobs(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    engine = connect(serve(mask=False))
    for options in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1, "temperature": 0.5}):
        with pytest.raises(
            UserError, match=r"request 0\.0: top_p, top_k or min_p is on, and SGLang server .* return_sampling_mask"
        ):
            engine.submit(tools.requests([(3,)], **options))
    assert tools.run(engine, tools.requests([(3,)], temperature=0.0, top_k=3)), (
        "greedy tokens are of the whole distribution"
    )


def test_a_truncated_distribution_has_as_many_tokens_as_a_server_reports(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    engine = connect(serve(mask_tokens=6))
    for options in ({"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}):
        with pytest.raises(
            UserError, match=r"up to \d+ tokens can be drawn, .* of 6 at most; set top_k, or start it with --samp"
        ):
            engine.submit(tools.requests([(3,)], **options))
    assert tools.run(engine, tools.requests([(3,)], top_k=6, min_p=0.1))


def test_top_k_with_top_p_is_refused_because_a_server_joins_them_in_another_way(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    with pytest.raises(UserError, match=r"request 0\.0: top_k and top_p together mean something else to SGLang"):
        connect(serve()).submit(tools.requests([(3,)], top_k=3, top_p=0.9))


def test_a_temperature_is_refused_where_a_server_gives_original_logprobs(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    engine = connect(serve(original_logprobs=True))
    with pytest.raises(
        UserError,
        match=r"temperature is 0\.7, .* gives log-probs of temperature 1; start it without SGLANG_RETURN_ORIGINAL",
    ):
        engine.submit(tools.requests([(3,)], temperature=0.7))
    assert len(tools.run(engine, [*tools.requests([(3,)]), *tools.requests([(3,), (4,)], temperature=0.0)[1:]])) == 2


# --- the stream ----------------------------------------------------------------------------------------------------------


def test_completions_come_as_they_finish_and_requests_may_be_submitted_meanwhile(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server = serve()
    engine = connect(server)
    server.behaviour.delay_s = 0.002
    long, short, late = tools.requests([(3,), (4,), (5,)], max_tokens=80)
    short, late = (replace(r, sampling=replace(r.sampling, max_tokens=2)) for r in (short, late))
    engine.submit([long, short])
    stream = engine.stream()
    assert next(stream).id == short.id
    engine.submit([late])
    assert [c.id for c in stream] == [late.id, long.id]
    assert list(engine.stream()) == []


def test_no_more_are_in_flight_than_allowed_and_the_highest_priority_goes_first(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server = serve()
    engine = connect(server, max_rows=1)
    server.calls.clear()
    wanted = [replace(r, priority=p) for r, p in zip(tools.requests([(3,)], 4), (0, 0, 5, 1), strict=True)]
    server.gate.clear()
    engine.submit(wanted[:1])
    engine.submit(wanted[1:])
    wait_for(lambda: len(server.running) == 1)
    time.sleep(0.05)
    assert len(server.calls) == 1
    server.gate.set()
    assert [c.id for c in engine.stream()] == ["0.0", "0.2", "0.3", "0.1"]


def test_an_interrupted_stream_ends_and_the_next_goes_on(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server, max_rows=2)
    server.gate.clear()
    wanted = tools.requests(PROMPTS, 2)
    engine.submit(wanted)
    engine.interrupt()
    assert list(engine.stream()) == []
    threading.Timer(0.1, engine.interrupt).start()
    assert list(engine.stream()) == []
    server.gate.set()
    assert sorted(c.id for c in engine.stream()) == sorted(r.id for r in wanted)


def test_requests_are_dealt_to_the_server_with_least_work(tools: Any, serve: Serve, connect: Connect) -> None:
    servers = [serve(), serve(), serve()]
    engine = connect(*servers, max_rows=9)
    for server in servers:
        server.gate.clear()
    wanted = tools.requests([(3,)], 9)
    engine.submit(wanted)
    wait_for(lambda: sum(len(s.running) for s in servers) == 9)
    assert [len(s.running) for s in servers] == [3, 3, 3]
    servers[1].gate.set()
    wait_for(lambda: not servers[1].running)
    engine.submit([replace(r, id=f"more {r.id}") for r in wanted[:2]])
    wait_for(lambda: len(servers[1].calls) > 0 and [len(s.running) for s in (servers[0], servers[2])] == [3, 3])
    for server in servers:
        server.gate.set()
    assert len(list(engine.stream())) == 11


# --- abort ---------------------------------------------------------------------------------------------------------------


def held(tools: Any, serve: Serve, connect: Connect, free: int = 4) -> tuple[SglangServer, SglangEngine, list[Request]]:
    """A server that stops after the first tokens of three requests, while a fourth waits."""
    server = serve()
    engine = connect(server, max_rows=3)
    server.free, server.behaviour.delay_s = free, 0.001
    wanted = tools.requests([(3, 4)], 4, max_tokens=30)
    engine.submit(wanted)
    wait_for(lambda: sum(count >= free for count in server._drawn.values()) >= 3)
    return server, engine, wanted


def test_what_is_aborted_is_returned_and_can_be_continued_as_if_it_had_never_stopped(
    tools: Any, serve: Serve, connect: Connect
) -> None:
    server, engine, wanted = held(tools, serve, connect)
    kept = {c.id: c for c in engine.abort([r.id for r in wanted], keep=True)}
    assert kept.keys() == {r.id for r in wanted}
    assert sorted(len(c.tokens) > 0 for c in kept.values()) == [False, True, True, True]
    assert list(engine.stream()) == []
    rest = []
    for request in wanted:
        part = kept[request.id]
        assert part.finish == "aborted"
        drawn = part.tokens.tolist()
        sampling = replace(request.sampling, max_tokens=30 - len(drawn))
        rest.append(replace(request, tokens=(*request.tokens, *drawn), sampling=sampling, generated=len(drawn)))
    found = tools.run(engine, rest)
    for request in wanted:
        tokens, logp, _ = expected(tools, server, request)
        both = [kept[request.id], found[request.id]]
        assert np.concatenate([c.tokens for c in both]).tolist() == tokens
        np.testing.assert_allclose(np.concatenate([c.logp for c in both]), np.float32(logp), rtol=1e-6, atol=1e-7)


def test_nothing_remains_of_what_is_aborted_without_keeping(tools: Any, serve: Serve, connect: Connect) -> None:
    server, engine, wanted = held(tools, serve, connect)
    assert engine.abort([r.id for r in wanted[:3]], keep=False) == []
    assert len(server.running) <= 1, "only the one that waited runs"
    assert [c.id for c in engine.stream()] == [wanted[3].id]
    with pytest.raises(KeyError, match=r"not running: \['0\.0'\]"):
        engine.abort(["0.0"], keep=False)
    assert tools.run(engine, wanted[:3]).keys() == {r.id for r in wanted[:3]}, "their names are free again"


def test_an_abort_stops_no_other_request(tools: Any, serve: Serve, connect: Connect) -> None:
    """A server matches an id as a prefix of ids."""
    server = serve()
    engine = connect(server, max_rows=20)
    server.gate.clear()
    wanted = [Request(name, (3,), SamplingOptions(max_tokens=5), i) for i, name in enumerate(("1", "10", "11", "1.0"))]
    engine.submit(wanted)
    wait_for(lambda: len(server.running) == 4)
    threading.Timer(0.2, server.gate.set).start()
    (stopped,) = engine.abort(["1"], keep=True)
    assert stopped.id == "1"
    found = {c.id: c for c in engine.stream()}
    assert {name: len(c.tokens) for name, c in found.items()} == {"10": 5, "11": 5, "1.0": 5}


def test_one_that_had_ended_when_it_is_aborted_is_kept_whole(tools: Any, serve: Serve, connect: Connect) -> None:
    server = serve()
    engine = connect(server)
    wanted = tools.requests([(3, 4)], 2, max_tokens=3)
    engine.submit(wanted)
    wait_for(lambda: len(engine._ready) == 2)
    (whole,) = engine.abort([wanted[0].id], keep=True)
    assert (len(whole.tokens), whole.finish) == (3, "length")
    assert [c.id for c in engine.stream()] == [wanted[1].id]


def test_an_aborted_request_of_a_server_that_hangs_is_given_up(
    tools: Any, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.inference.sglang.sglang_engine.ABORT_TIMEOUT_S", 0.3)
    server = serve()
    engine = connect(server)
    server.faults.append("hang")
    wanted = tools.requests([(3, 4)], 2, max_tokens=3)
    engine.submit(wanted[:1])
    wait_for(lambda: not server.faults)
    (given_up,) = engine.abort([wanted[0].id], keep=True)
    assert isinstance(given_up, Completion)
    assert (len(given_up.tokens), given_up.finish) == (0, "aborted")
    assert tools.run(engine, wanted).keys() == {r.id for r in wanted}
