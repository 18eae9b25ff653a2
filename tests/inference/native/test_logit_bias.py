"""Logit bias and raw log-probs in every engine, next to rows without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.engine_common import MAX_BIASES
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.native.sampler import add_bias
from burnish.models.decoder import Decoder


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


def biased(request: Request, *pairs: tuple[int, float], **options: Any) -> Request:
    return replace(request, sampling=replace(request.sampling, logit_bias=pairs, **options))


def test_a_bias_is_added_to_its_row_alone_in_float32_at_least() -> None:
    logits = torch.zeros(3, 5, dtype=torch.bfloat16)
    got = add_bias(logits, [((1, 0.1), (4, -100.0)), (), ((0, 3.0),)])
    assert got.dtype == torch.float32
    assert not logits.any(), "what was given stays as it was"
    expected = torch.tensor([[0, 0.1, 0, 0, -100], [0] * 5, [3, 0, 0, 0, 0]])
    assert torch.equal(got, expected)


def test_a_token_of_100_is_always_drawn_and_one_of_minus_100_never(tools: Any, make: Any, model: Decoder) -> None:
    base = tools.requests([(3, 4)], 40, max_tokens=3)
    wanted = [biased(r, (7, 100.0)) if i % 2 else biased(r, (7, -100.0), (3, -100.0)) for i, r in enumerate(base)]
    got = tools.run(make(model, max_rows=16), wanted)
    for request in wanted:
        tokens = set(got[request.id].tokens.tolist())
        assert tokens == {7} if len(request.sampling.logit_bias) == 1 else not tokens & {3, 7}


def test_logprobs_are_of_the_biased_distribution_and_raw_ones_of_the_model(
    tools: Any, native: Any, make: Any, model: Decoder
) -> None:
    base = tools.requests([(3, 4, 5)], 6, temperature=0.6, top_k=5)
    wanted = [biased(r, (1, 2.0), (6, -1.5), raw_logprobs=True) for r in base]
    got = tools.run(make(model, max_rows=4), wanted)
    native.agree(tools, model, got, wanted)
    for request in wanted:
        plain = replace(request, sampling=SamplingOptions(temperature=1.0))
        found = got[request.id]
        np.testing.assert_allclose(found.raw_logp, native.learner_logp(model, plain, found), rtol=1e-6)
        assert np.abs(found.raw_logp - found.logp).max() > 0.1


def test_without_options_the_raw_logprob_is_the_reported_one(tools: Any, make: Any, model: Decoder) -> None:
    got = tools.run(make(model, max_rows=2), tools.requests([(3,), (4, 5)], 2, raw_logprobs=True))
    for completion in got.values():
        np.testing.assert_allclose(completion.raw_logp, completion.logp, rtol=1e-6)


def test_a_neighbour_with_a_bias_or_raw_logprobs_changes_nothing(tools: Any, make: Any, model: Decoder) -> None:
    plain = tools.requests([(3, 4, 5)], 3, max_tokens=20)
    alone = tools.run(make(model, max_rows=6), plain)
    beside = [replace(biased(r, (2, 5.0), raw_logprobs=True), id=f"beside {r.id}") for r in plain]
    crowd = tools.run(make(model, max_rows=6), [*beside, *plain])
    for request in plain:
        assert crowd[request.id].tokens.tolist() == alone[request.id].tokens.tolist()
        np.testing.assert_allclose(crowd[request.id].logp, alone[request.id].logp, rtol=2e-7)
        assert crowd[request.id].raw_logp is None


def test_a_row_keeps_no_bias_of_the_one_before(tools: Any, native: Any, make: Any, model: Decoder) -> None:
    base = tools.requests([(3, 4, 5)], 6, max_tokens=4)
    wanted = [biased(r, (7, 100.0)) if i % 2 == 0 else r for i, r in enumerate(base)]
    native.agree(tools, model, tools.run(make(model, max_rows=1), wanted), wanted)


def test_what_is_aborted_keeps_its_raw_logprobs(tools: Any, make: Any, model: Decoder) -> None:
    engine = make(model, 1, listener=lambda *what: engine.interrupt())
    running, waiting = tools.requests([(3, 4)], 2, max_tokens=200, raw_logprobs=True)
    engine.submit([running, waiting])
    while not engine.stats.tokens:
        assert list(engine.stream()) == []
    kept = {c.id: c for c in engine.abort([running.id, waiting.id], keep=True)}
    assert len(kept[running.id].raw_logp) == len(kept[running.id].tokens) > 0
    assert kept[waiting.id].raw_logp.tolist() == []


@pytest.mark.parametrize("end", [2, 5, 9, 12])
def test_a_stop_string_cuts_the_raw_logprobs_too(tools: Any, native: Any, make: Any, end: int) -> None:
    engine = make(tools.successor(64), 2, native.spell)
    (wanted,) = tools.requests([(0,)], max_tokens=40, stop=(native.spell([end]),), raw_logprobs=True)
    completion = tools.run(engine, [wanted])[wanted.id]
    assert len(completion.raw_logp) == len(completion.tokens) == end


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (((13, 1.0),), "names token 13, which is not one of the model's, 0 to 12"),
        (((-1, 1.0),), "names token -1"),
        (((3, 1.0), (3, 2.0)), "names a token twice"),
        (((3, float("-inf")),), "must be finite"),
        (((3, float("nan")),), "must be finite"),
        (tuple((i, 1.0) for i in range(MAX_BIASES + 1)), rf"names {MAX_BIASES + 1} tokens; expected {MAX_BIASES} at most"),
    ],
)  # fmt: skip
def test_a_bias_that_means_nothing_is_refused(
    tools: Any, make: Any, model: Decoder, pairs: tuple[tuple[int, float], ...], words: str
) -> None:
    (request,) = tools.requests([(3,)])
    with pytest.raises(UserError, match=rf"request 0\.0: logit_bias {words}"):
        make(model).submit([biased(request, *pairs)])


def test_as_many_biases_as_a_row_holds(tools: Any, native: Any, make: Any) -> None:
    model = tools.decoder(vocab=MAX_BIASES + 9)
    pairs = tuple((i, 0.01 * i - 1) for i in range(MAX_BIASES))
    wanted = [biased(r, *pairs) for r in tools.requests([(3, 4, 5)], 2, max_tokens=5)]
    native.agree(tools, model, tools.run(make(model, max_rows=2), wanted), wanted)


def test_exact_mode_refuses_a_bias_with_the_reason(tools: Any) -> None:
    engine = PagedEngine(tools.decoder(torch.float32), 2, exact=True)
    (request,) = tools.requests([(3,)])
    with pytest.raises(
        UserError, match=r"request 0\.0: logit_bias in exact mode: .* the learner's are of the model's own"
    ):
        engine.submit([biased(request, (3, 1.0))])
