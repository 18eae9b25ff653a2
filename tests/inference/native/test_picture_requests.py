"""Native engines with pictures: the learner's log-probs, shared prefixes, features computed once, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.random_keys import fold
from burnish.inference.native import scheduler
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.cached_forward import exact_logprobs, pass_rotations
from burnish.models.decoder import Decoder
from burnish.models.vision.pieces import Piece, piece_pass
from burnish.models.weight_files import load_decoder
from tests.models.vision.conftest import TinyVision, random_picture
from tests.models.vision.test_qwen_vision import FAMILIES, IMAGE, rows_of

CPU = torch.device("cpu")
ENGINES = {
    "dense": DenseEngine,
    "paged": PagedEngine,
    "few rows": partial(PagedEngine, max_rows=3),
    "preempted": partial(PagedEngine, num_blocks=14, steps_per_launch=4),
    "fp8": partial(PagedEngine, quantised=True),
}


def requests_of(family: str, samples: int = 2, max_tokens: int = 21, **sampling: Any) -> list[Request]:
    options = SamplingOptions(max_tokens=max_tokens, temperature=0.9, **sampling)
    return [
        Request(f"{i}.{j}", tuple(tokens), options, fold(i, j), pictures=spans)
        for i, (tokens, spans) in enumerate(rows_of(family))
        for j in range(samples)
    ]


def completed(engine: Any, requests: list[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    return {completion.id: completion for completion in engine.stream()}


def learner_logprobs(model: Decoder, requests: list[Request], got: dict[str, Completion]) -> torch.Tensor:
    """The learner's log-probs of all drawn tokens, as one packed batch."""
    tokens: list[int] = []
    offsets, wanted = [0], list[int]()
    for request in requests:
        tokens += [*request.tokens, *got[request.id].tokens.tolist()]
        wanted += range(offsets[-1] + len(request.tokens), len(tokens))
        offsets.append(len(tokens))
    bounds = torch.tensor(offsets)
    assert model.arch.vision is not None
    lengths = bounds.diff().tolist()
    pieces = [Piece(0, length, request.pictures) for length, request in zip(lengths, requests, strict=True)]
    pictures = piece_pass(pieces, model.arch.vision, CPU)
    temperature = requests[0].sampling.temperature
    with torch.no_grad(), model.with_pictures(pictures):
        return model.token_logprobs(torch.tensor(tokens), bounds, torch.tensor(wanted), temperature)[0]


def engine_logprobs(requests: list[Request], got: dict[str, Completion]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([got[request.id].logp for request in requests]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ENGINES)
def test_log_probs_are_the_learners(
    monkeypatch: pytest.MonkeyPatch, tiny_vision: TinyVision, family: str, kind: str
) -> None:
    """Prompts are prefilled in chunks of up to 20 tokens; most pictures fit into one."""
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 20)
    model, requests = load_decoder(tiny_vision(family)[1], torch.float32, CPU), requests_of(family)
    engine = ENGINES[kind](model)
    got = completed(engine, requests)
    mine, learners = engine_logprobs(requests, got), learner_logprobs(model, requests, got)
    if kind == "fp8":  # without the pictures' rotation positions the mean is 0.7
        assert (mine - learners).abs().mean() < 0.1
    else:
        torch.testing.assert_close(mine, learners, atol=2e-4, rtol=1e-4)
    assert model.feature_cache is not None
    assert model.feature_cache.num_computed == 4  # the learner computes none again
    if kind == "preempted":
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize(("family", "dtype"), [*zip(FAMILIES, (torch.float32, torch.bfloat16), strict=True)], ids=str)
def test_exact_mode_gives_the_learner_the_very_bits(
    monkeypatch: pytest.MonkeyPatch, tiny_vision: TinyVision, family: str, dtype: torch.dtype
) -> None:
    model, requests = load_decoder(tiny_vision(family)[1], dtype, CPU), requests_of(family, samples=2, max_tokens=9)
    model.exact = partial(exact_logprobs, model)
    alone = completed(PagedEngine(model, exact=True, max_rows=1), requests)
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 20)
    got = completed(PagedEngine(model, exact=True), requests)
    assert torch.equal(engine_logprobs(requests, got), learner_logprobs(model, requests, got))
    assert all(np.array_equal(alone[name].tokens, got[name].tokens) for name in got)
    assert model.feature_cache is not None
    model.feature_cache.clear()  # the learner computes the same bits by itself
    assert torch.equal(engine_logprobs(requests, got), learner_logprobs(model, requests, got))


def two_prompts(first: Picture, second: Picture) -> list[Request]:
    """The same tokens with different pictures, and each picture twice."""
    tokens = (5, *[IMAGE] * 16, *range(2, 30))
    options = SamplingOptions(max_tokens=4, temperature=0)
    return [
        Request(str(i), tokens, options, i, pictures=(PictureSpan(1, picture),), may_continue=True)
        for i, picture in enumerate((first, second, first, second))
    ]


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_a_prefix_is_shared_with_the_same_picture_and_never_with_another(tiny_vision: TinyVision, kind: str) -> None:
    model = load_decoder(tiny_vision("qwen2_5_vl")[1], torch.float32, CPU)
    requests = two_prompts(random_picture((1, 4, 4), 1), random_picture((1, 4, 4), 2))
    engine = ENGINES[kind](model)
    got = completed(engine, requests)
    alone = {r.id: c for r in requests for c in completed(ENGINES[kind](model), [r]).values()}
    for name in got:
        np.testing.assert_allclose(got[name].logp, alone[name].logp, atol=1e-4)
    assert abs(got["0"].logp - got["1"].logp).max() > 1e-2
    assert engine.stats.prefilled_tokens == 2 * 45
    if kind == "paged":  # a later turn finds the blocks of its pictures
        turn = [replace(r, id=f"{r.id}+", tokens=(*r.tokens, *got[r.id].tokens.tolist(), 7)) for r in requests[:2]]
        again = completed(engine, turn)
        assert engine.stats.prefilled_tokens == 2 * 45 + 2 * (50 - 48)
        torch.testing.assert_close(
            engine_logprobs(turn, again), learner_logprobs_greedy(model, turn, again), atol=2e-4, rtol=1e-4
        )


def learner_logprobs_greedy(model: Decoder, requests: list[Request], got: dict[str, Completion]) -> torch.Tensor:
    warm = [replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests]
    return learner_logprobs(model, warm, got)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_placeholders_are_never_drawn(tiny_vision: TinyVision, kind: str) -> None:
    model = load_decoder(tiny_vision("qwen2_5_vl")[1], torch.float32, CPU)
    with torch.no_grad():
        model.head_weight[50:52] = 3 * model.head_weight[2:49].abs().amax(0)  # often the likeliest tokens
    for sampling in ({}, {"top_k": 1}, {"logit_bias": ((50, 90.0),)}):
        requests = requests_of("qwen2_5_vl", **sampling)
        got = completed(ENGINES[kind](model), requests)
        assert not {50, 51} & {token for c in got.values() for token in c.tokens.tolist()}
        assert {52, 53} & {token for c in got.values() for token in c.tokens.tolist()} or sampling
    requests = requests_of("qwen2_5_vl")
    got = completed(ENGINES[kind](model), requests)
    # The log-probs are of the whole distribution, as the learner's.
    torch.testing.assert_close(
        engine_logprobs(requests, got), learner_logprobs(model, requests, got), atol=2e-4, rtol=1e-4
    )


def test_features_are_dropped_when_the_tower_changes_and_only_then(tiny_vision: TinyVision) -> None:
    model = load_decoder(tiny_vision("qwen3_vl")[1], torch.float32, CPU)
    model.requires_grad_(False)
    cache, vision = model.feature_cache, model.vision
    assert cache is not None
    assert vision is not None
    pictures = [random_picture((1, 2, 3), seed) for seed in range(3)]
    first = cache.features(pictures)
    assert cache.num_computed == 3
    torch.testing.assert_close(cache.features(pictures[::-1]).embeddings[-6:], first.embeddings[:6])
    model.embedding.weight.add_(1.0)
    cache.features(pictures)
    assert cache.num_computed == 3
    next(vision.parameters()).mul_(1.5)
    changed = cache.features(pictures)
    assert cache.num_computed == 6
    assert not torch.allclose(changed.deep[0], first.deep[0])
    cache.max_bytes = cache.num_bytes // 2
    cache.features(pictures[:1])
    assert len(cache) == 1
    assert cache.features([]).embeddings.shape == (0, 32)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_new_weights_keep_the_features_of_a_frozen_tower_of_the_learner_only(
    tiny_vision: TinyVision, kind: str
) -> None:
    """Writes through `data` have no version counter."""
    model = load_decoder(tiny_vision("qwen2_5_vl")[1], torch.float32, CPU)
    engine, requests = ENGINES[kind](model), requests_of("qwen2_5_vl", samples=1, max_tokens=3)
    cache, vision = model.feature_cache, model.vision
    assert cache is not None
    assert vision is not None
    vision.requires_grad_(False)
    completed(engine, requests)
    engine.load(1, ())
    completed(engine, requests)
    assert cache.num_computed == 4
    for of_learner in (True, False):  # a trained tower, and the copy of a module, which trains nothing
        model.requires_grad_(of_learner)
        for parameter in vision.parameters():
            parameter.data.mul_(1.1)
        engine.load(2, ())
        got = completed(engine, requests)
        cache.clear()
        torch.testing.assert_close(
            engine_logprobs(requests, got), learner_logprobs(model, requests, got), atol=2e-4, rtol=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_rotation_rows_are_contiguous_since_kernels_read_them_by_their_address(
    tiny_vision: TinyVision, family: str
) -> None:
    model, (request, *_) = load_decoder(tiny_vision(family)[1], torch.float32, CPU), requests_of(family, samples=1)
    assert model.arch.vision is not None
    pieces = [Piece(3, len(request.tokens), request.pictures)]
    with model.with_pictures(piece_pass(pieces, model.arch.vision, CPU)):
        for tables in pass_rotations(model, 99):
            assert all(table.is_contiguous() and table.shape[0] == len(request.tokens) - 3 for table in tables)


def test_requests_whose_pictures_do_not_fit_their_tokens_are_refused(tiny_vision: TinyVision, tools: Any) -> None:
    model = load_decoder(tiny_vision("qwen2_5_vl")[1], torch.float32, CPU)
    picture, options = random_picture((1, 2, 2), 0), SamplingOptions(max_tokens=2)

    def refused(tokens: tuple[int, ...], *spans: PictureSpan, by: Any = model) -> str:
        with pytest.raises(UserError) as error:
            DenseEngine(by).submit([Request("r", tokens, options, 0, pictures=spans)])
        return str(error.value)

    four = (IMAGE,) * 4
    assert "reads text only" in refused((1, *four[:0], 2), PictureSpan(1, picture), by=tools.decoder(torch.float32))
    assert "exceeds the prompt" in refused((1, *four), PictureSpan(2, picture))
    assert "overlaps" in refused((1, *four), PictureSpan(1, picture), PictureSpan(1, picture))
    assert "no placeholders" in refused((1, 7, *four[1:]), PictureSpan(1, picture))
    assert "placeholder 50 of a picture that the request does not have" in refused((1, *four))
