"""Native engines with Idefics3 and Gemma 3, whose tokens of a picture attend to each other: the learner's log-probs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from burnish.core.engine import Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.inference.native import scheduler
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.cached_forward import exact_logprobs
from burnish.models.decoder import Decoder
from burnish.models.weight_files import load_decoder
from tests.inference.native.test_picture_requests import ENGINES, completed, engine_logprobs, learner_logprobs
from tests.models.vision.tiny_siglip import random_picture, row, rows_of, siglip_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in ("idefics3", "gemma3")}
    for family, directory in made.items():
        siglip_model(family).save_pretrained(directory)
    return made


def requests_of(family: str, samples: int = 3, max_tokens: int = 21) -> list[Request]:
    options = SamplingOptions(max_tokens=max_tokens, temperature=0.9)
    return [
        Request(f"{i}.{j}", tuple(tokens), options, fold(i, j), pictures=spans)
        for i, (tokens, spans) in enumerate(rows_of(family))
        for j in range(samples)
    ]


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
@pytest.mark.parametrize("kind", ENGINES)
def test_log_probs_are_the_learners(
    monkeypatch: pytest.MonkeyPatch, directories: dict[str, Path], family: str, kind: str
) -> None:
    """Prompts are prefilled in chunks of up to 20 tokens, which end before a picture that they would cut."""
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 20)
    model, requests = load_decoder(directories[family], torch.float32, CPU), requests_of(family)
    got = completed(ENGINES[kind](model), requests)
    mine, learners = engine_logprobs(requests, got), learner_logprobs(model, requests, got)
    if kind == "fp8":
        assert (mine - learners).abs().mean() < 0.1
    else:
        torch.testing.assert_close(mine, learners, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_mode_gives_the_learner_the_very_bits(
    monkeypatch: pytest.MonkeyPatch, directories: dict[str, Path], dtype: torch.dtype
) -> None:
    model = load_decoder(directories["gemma3"], dtype, CPU)
    requests = requests_of("gemma3", samples=2, max_tokens=9)
    model.exact = partial(exact_logprobs, model)
    alone = completed(PagedEngine(model, exact=True, max_rows=1), requests)
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 20)
    got = completed(PagedEngine(model, exact=True), requests)
    assert torch.equal(engine_logprobs(requests, got), learner_logprobs(model, requests, got))
    assert all(np.array_equal(alone[name].tokens, got[name].tokens) for name in got)
    if dtype == torch.float32:
        model.exact = None
        plain = learner_logprobs(model, requests, got)
        torch.testing.assert_close(engine_logprobs(requests, got), plain, atol=2e-4, rtol=1e-4)


def test_a_prefix_may_end_within_a_picture(directories: dict[str, Path]) -> None:
    """The second prompt finds a block of 16 tokens in the cache, which ends in the second picture of both prompts."""
    model: Decoder = load_decoder(directories["gemma3"], torch.float32, CPU)
    first, second = random_picture("gemma3", 1), random_picture("gemma3", 2)
    beginning = row(0, 1, first, 1, second)
    options = SamplingOptions(max_tokens=4, temperature=0.9)
    requests = [
        Request(str(seed), tuple(beginning[0] + row(seed, 7)[0]), options, seed, pictures=beginning[1])
        for seed in (5, 6)
    ]
    engine = PagedEngine(model)
    got = completed(engine, requests[:1]) | completed(engine, requests[1:])
    assert engine.stats.prefilled_tokens == 2 * 27 - 16
    torch.testing.assert_close(
        engine_logprobs(requests, got), learner_logprobs(model, requests, got), atol=2e-4, rtol=1e-4
    )


def test_a_prefill_that_would_cut_a_picture_is_an_error(
    monkeypatch: pytest.MonkeyPatch, directories: dict[str, Path]
) -> None:
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 8)
    model = load_decoder(directories["gemma3"], torch.float32, CPU)
    with pytest.raises(ValueError, match="within a picture"):
        completed(PagedEngine(model), requests_of("gemma3", samples=1)[:1])
