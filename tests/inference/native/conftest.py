"""Shared by the tests of the native engines: requests of every kind, and reference samplers without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold, to_int64, uniforms
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder
from tests.models.vision.conftest import tiny_vision  # noqa: F401 (a fixture)

SAMPLINGS = [
    SamplingOptions(max_tokens=9),
    SamplingOptions(max_tokens=30, temperature=0.7, stop_tokens=(1,)),
    SamplingOptions(max_tokens=17, top_k=4, stop_tokens=(1, 5)),
    SamplingOptions(max_tokens=25, top_p=0.8),
    SamplingOptions(max_tokens=1),
    SamplingOptions(max_tokens=12, temperature=0.0),
    SamplingOptions(max_tokens=70, temperature=1.3, top_k=6, top_p=0.9),
    SamplingOptions(max_tokens=20, min_p=0.2),
    SamplingOptions(max_tokens=6, temperature=0.0, top_k=3, top_p=0.9, min_p=0.1),
    SamplingOptions(max_tokens=14, logit_bias=((5, 3.0), (0, -100.0)), raw_logprobs=True),
    SamplingOptions(max_tokens=11, temperature=0.7, top_k=3, top_p=0.9, logit_bias=((2, 1.5),), raw_logprobs=True),
    SamplingOptions(max_tokens=8, temperature=0.0, logit_bias=((7, 100.0), (4, 99.9))),
]
PROMPTS = [
    (3,), (4, 5, 6), (3, 3, 9, 2, 7, 7, 8, 1, 0, 4), (4, 5, 6), (11, 2), (6,) * 40, (9, 8, 7), (6,) * 35, (4, 5, 6), (4, 5, 6), (2,), (4, 5, 6),
]  # fmt: skip


@dataclass(frozen=True)
class Native:
    """The functions below, by a fixture (test modules cannot import one another)."""

    mixed_requests: Callable[[], list[Request]]
    full_forward: Callable[[Decoder], Callable[[list[int]], Tensor]]
    learner_logp: Callable[[Decoder, Request, Completion], np.ndarray]
    agree: Callable[..., None]
    same: Callable[[Completion, Completion], None]
    no_block_is_held: Callable[[PagedEngine], None]
    pool: Callable[[], list[Request]]
    play: Callable[..., None]
    spell: Callable[[Sequence[int]], str]


@pytest.fixture(scope="session")
def native() -> Native:
    return Native(mixed_requests, full_forward, learner_logp, agree, same, no_block_is_held, pool, play, spell)


@pytest.fixture(params=[DenseEngine, PagedEngine], ids=["dense", "paged"])
def make(request: pytest.FixtureRequest) -> Any:
    """Each of the engines: what holds for both is a test of the contract."""
    return request.param


def mixed_requests() -> list[Request]:
    """Prompts of different lengths, some equal and some beginning alike, with every kind of sampling option."""
    return [
        Request(f"r{i}", prompt, sampling, fold("mixed", i), generated=i % 3)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]


def spell(tokens: Sequence[int]) -> str:
    """Tokens as letters: 0 is a."""
    return "".join(chr(97 + token) for token in tokens)


# --- references --------------------------------------------------------------------------------------------------------------


def full_forward(model: Decoder) -> Callable[[list[int]], Tensor]:
    """Logits of the next token, by a forward over everything before it."""

    def next_logits(tokens: list[int]) -> Tensor:
        return _all_logits(model, tokens)[-1]

    return next_logits


def _all_logits(model: Decoder, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return model.logits(model.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)])))


def learner_logp(model: Decoder, request: Request, completion: Completion) -> np.ndarray:
    """The learner's log-probs of a completion's tokens."""
    device = model.embedding.weight.device
    tokens = torch.tensor([*request.tokens, *completion.tokens.tolist()], device=device)
    offsets = torch.tensor([0, len(tokens)], device=device)
    wanted = torch.arange(len(request.tokens), len(tokens), device=device)
    with torch.no_grad():
        logp, _ = model.token_logprobs(tokens, offsets, wanted, request.sampling.temperature or 1.0)
    return logp.float().cpu().numpy()


def agree(tools: Any, model: Decoder, got: Mapping[str, Completion], wanted: Iterable[Request]) -> None:
    """Every completion is the one a sampler without a cache draws.

    One forward over the prompt and the completion gives the distribution of each token given those before it; the token
    there must be the one that the request's noise picks, so by induction all of them are.
    """
    for request in wanted:
        completion, options = got[request.id], request.sampling
        tokens = completion.tokens.tolist()
        logits = _all_logits(model, [*request.tokens, *tokens])[len(request.tokens) - 1 : -1]
        noise = uniforms(
            torch.full((len(tokens),), to_int64(request.key)), request.generated + torch.arange(len(tokens))
        ).tolist()
        p = [tools.distribution(line, options) for line in logits]
        drawn = [
            int(line.argmax()) if options.temperature == 0 else int((line.cumsum(0) < u).sum())
            for line, u in zip(p, noise, strict=True)
        ]
        assert tokens == drawn, request.id
        logp = [float(line[token].log()) for line, token in zip(p, tokens, strict=True)]
        np.testing.assert_allclose(completion.logp, np.float32(logp), rtol=2e-7, atol=1e-12)
        raw = [float(line[token]) for line, token in zip(logits.log_softmax(-1), tokens, strict=True)]
        if options.raw_logprobs:
            np.testing.assert_allclose(completion.raw_logp, np.float32(raw), rtol=2e-7, atol=1e-12)
        else:
            assert completion.raw_logp is None
        assert not set(tokens[:-1]) & set(options.stop_tokens)
        assert completion.finish == ("stop" if tokens[-1] in options.stop_tokens else "length")
        assert completion.finish == "stop" or len(tokens) == options.max_tokens


def same(one: Completion, other: Completion) -> None:
    """The same tokens and finish, and the same log-probs but for the last bit."""
    assert one.tokens.tolist() == other.tokens.tolist(), one.id
    assert one.finish == other.finish, one.id
    np.testing.assert_allclose(one.logp, other.logp, rtol=2e-7, atol=1e-12)
    assert (one.raw_logp is None) == (other.raw_logp is None)
    if one.raw_logp is not None:
        np.testing.assert_allclose(one.raw_logp, other.raw_logp, rtol=2e-7, atol=1e-12)


def no_block_is_held(engine: PagedEngine) -> None:
    """Nothing runs or waits, and every block is free or evictable."""
    blocks = engine.block_manager
    assert (engine.scheduler.num_running, len(engine.waiting), len(engine.ready)) == (0, 0, 0)
    assert not any(blocks.ref_counts)
    assert sorted([*blocks.free, *blocks.evictable]) == list(range(1, blocks.num_usable + 1))


# --- random sequences ----------------------------------------------------------------------------------------------------


@cache
def pool() -> list[Request]:
    """Requests for random sequences of actions: groups, shared prefixes, borders of blocks of 4 tokens, long and short ones."""
    base = tuple((7 * i + i * i) % 13 for i in range(16))
    prompts = [base[:3], base[:4], base[:5], base[:8], base[:11], (*base[:8], 1, 2), (5, *base[:6])]
    options = [
        SamplingOptions(max_tokens=1), SamplingOptions(max_tokens=5), SamplingOptions(max_tokens=17),
        SamplingOptions(max_tokens=20, stop_tokens=(2, 3)),
        SamplingOptions(max_tokens=14, top_k=4, min_p=0.1, logit_bias=((3, 1.0), (9, -2.0)), raw_logprobs=True),
    ]  # fmt: skip
    return [
        Request(f"{p}.{o}.{k}", prompt, option, fold("pool", p, o, k), priority=(p + k) % 3)
        for p, prompt in enumerate(prompts)
        for o, option in enumerate(options)
        for k in range(2)
    ]


def play(engine: PagedEngine, actions: Iterable[tuple[str, Any]], whole: Mapping[str, Completion] | None) -> None:
    """Submit, stream, abort and sleep in the order of `actions`. Every request is answered once, and no block leaks.

    The listener must have been called with exactly the tokens of each completion. With `whole`, a completion must equal the one
    there, and an aborted one must be its beginning.
    """
    requests = {request.id: request for request in pool()}
    heard: dict[str, list[int]] = {}
    asked: set[str] = set()
    answers: list[Completion] = []

    def hear(name: str, token: int) -> None:
        heard.setdefault(name, []).append(token)
        engine.interrupt()

    engine.listener = hear

    def collect(found: Iterable[Completion]) -> None:
        for completion in found:
            asked.remove(completion.id)  # or it was answered twice, or never asked
            answers.append(completion)
            assert heard.pop(completion.id, []) == completion.tokens.tolist()

    def stop(picks: Sequence[int], keep: bool) -> None:
        chosen = [name for i, name in enumerate(sorted(asked)) if i in picks]
        kept = engine.abort(chosen, keep)
        assert sorted(c.id for c in kept) == (chosen if keep else [])
        if keep:
            collect(kept)
        for name in chosen if not keep else []:
            asked.remove(name)
            heard.pop(name, None)

    for verb, what in actions:
        if verb == "submit":
            fresh = [pool()[i] for i in dict.fromkeys(what) if pool()[i].id not in asked]
            engine.submit(fresh)
            asked |= {request.id for request in fresh}
        elif verb == "stream":
            for _ in range(what):
                collect(engine.stream())
        elif verb == "take":
            stream = engine.stream()
            collect(islice(stream, what))
            stream.close()
        elif verb in ("keep", "drop"):
            stop(what, verb == "keep")
        elif not asked:
            engine.sleep()
            engine.load(engine.version + 1, [])
    for _ in range(1000):
        if asked:
            collect(engine.stream())
    assert not asked, "unanswered"
    no_block_is_held(engine)
    for completion in answers:
        limit = requests[completion.id].sampling.max_tokens
        assert len(completion.tokens) == limit or completion.finish != "length"
        if whole is None:
            continue
        expected = whole[completion.id]
        if completion.finish == "aborted":
            count = len(completion.tokens)
            assert completion.tokens.tolist() == expected.tokens.tolist()[:count]
            assert count < len(expected.tokens)
        else:
            same(completion, expected)
