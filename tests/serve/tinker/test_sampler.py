"""Engines of several kinds of weights over one base: each request is sampled from its own weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.model import Lora
from burnish.config.rollout import Rollout
from burnish.models.policy import PolicyModel
from burnish.serve.tinker.requests import Sample
from burnish.serve.tinker.responses import SampleOutput
from burnish.serve.tinker.sampler import SampleJob, SamplerPool, SamplerWeights
from burnish.serve.tinker.training_model import TrainingModel
from tests.serve.tinker.conftest import TOKEN_BUDGET, next_tokens

PROMPT = list(range(30, 60))


def trained(base: PolicyModel, rank: int | None, seed: int) -> TrainingModel:
    """A model whose weights differ from the base's."""
    model = TrainingModel(base, None if rank is None else Lora(rank=rank, alpha=32), seed, TOKEN_BUDGET)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


@pytest.mark.parametrize("rollout", [Rollout(max_rows=4), Rollout(max_rows=4, cache_gib=0.01)], ids=["dense", "paged"])
def test_samples_come_from_the_weights_that_they_name_whatever_ran_before(
    tiny_base: PolicyModel, rollout: Rollout
) -> None:
    models = [trained(tiny_base, rank, seed) for seed, rank in enumerate((3, 3, 5, None))]
    weights = [
        SamplerWeights("full" if model.lora is None else "adapter", model.lora, model.snapshot()) for model in models
    ]
    plain = TrainingModel(tiny_base, Lora(rank=1), 0, TOKEN_BUDGET)  # B is 0: the base
    pool = SamplerPool(tiny_base, rollout, TOKEN_BUDGET)
    results: dict[str, Any] = {}
    pairs = [*zip(models, weights, strict=True), (plain, SamplerWeights())]
    chunks = {"chunks": [{"tokens": PROMPT}]}
    params = {"max_tokens": 12, "temperature": 1.0, "stop": []}
    asked = Sample.model_validate(
        {"prompt": chunks, "sampling_params": params, "num_samples": 3, "prompt_logprobs": True}
    )
    for turn in range(2):
        for index, (_, one) in enumerate(pairs):
            name = f"{turn}:{index}"
            pool.run([SampleJob(name, asked, one, partial(results.__setitem__, name), seed=index)], list)
    assert len(pool.slots) == 4
    for index, (model, _) in enumerate(pairs):
        first, second = results[f"0:{index}"], results[f"1:{index}"]
        assert isinstance(first, SampleOutput)
        for ours, again in zip(first.sequences, second.sequences, strict=True):
            np.testing.assert_array_equal(ours.tokens, again.tokens)
            whole = next_tokens([*PROMPT, *ours.tokens.tolist()])
            expected = model.forward_backward([whole], "cross_entropy", {}, forward_only=True).logprobs[0]
            np.testing.assert_allclose(ours.logprobs, expected[len(PROMPT) - 1 :], rtol=1e-4)
            np.testing.assert_allclose(first.prompt.logprobs[1:], expected[: len(PROMPT) - 1], rtol=1e-4)
    assert len({tuple(results[f"0:{index}"].prompt.logprobs[1:]) for index in range(5)}) == 5
