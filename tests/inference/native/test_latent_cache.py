"""The paged engine with a cache of latents (DeepSeek's attention) against the engine that expands the heads, and against the learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.model import Lora
from burnish.inference.native.paged_engine import BLOCK_SIZE, PagedEngine
from burnish.models.kernels.paged_cache import LatentCache
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import adapter_weights, add_lora

LATENT = {
    "family": "deepseek_v3", "num_kv_heads": 4, "head_dim": 12, "latent": LatentShape(10, 6, 8, 4, 6), "query_scale": 1.3,
}  # fmt: skip
PROMPT = tuple(range(1, 12)) * 3


@pytest.mark.parametrize("lora", [None, Lora(rank=3, alpha=6, targets=["q_b_proj", "kv_b_proj", "o_proj"])])
def test_latents_and_expanded_heads_give_the_same_tokens(tools: Any, native: Any, lora: Lora | None) -> None:
    """In float32. Exact mode caches expanded heads; prompts share blocks, and a small cache preempts rows."""
    model = tools.decoder(torch.float32, **LATENT)
    if lora is not None:
        add_lora(model, lora, 0)
        with torch.no_grad():
            for parameter in adapter_weights(model).values():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    requests = [r for r in native.mixed_requests() if not r.sampling.logit_bias]
    requests += tools.requests([PROMPT, (*PROMPT, 3)], n=2, max_tokens=30)
    latent, expanded = PagedEngine(model, max_rows=4, num_blocks=14), PagedEngine(model, max_rows=4, exact=True)
    mine, theirs = tools.run(latent, requests), tools.run(expanded, requests)
    assert isinstance(latent.runner.cache, LatentCache)
    assert isinstance(expanded.runner.cache, torch.Tensor)
    for name, completion in mine.items():
        assert completion.tokens.tolist() == theirs[name].tokens.tolist(), name
        np.testing.assert_allclose(completion.logp, theirs[name].logp, atol=2e-5)


def test_the_cache_has_as_many_bytes_as_planned(tools: Any) -> None:
    model = tools.decoder(torch.float32, **LATENT)
    each = {
        False: 2 * (6 + 4) * 4,
        True: 2 * (6 + 4 + 2 * 4),
    }  # layers, rank and rotated key, element or 8 bits with two scales
    for quantised, size in each.items():
        engine = PagedEngine(model, max_rows=2, num_blocks=9, quantised=quantised)
        tools.run(engine, tools.requests([(1, 2, 3)]))
        assert engine.token_bytes == size
        assert sum(x.numel() * x.element_size() for x in engine.runner._tensors()) == 9 * BLOCK_SIZE * size
    assert PagedEngine(model, exact=True).token_bytes == 2 * 2 * 4 * 12 * 4


def test_8_bit_latents_stay_near_the_learner(tools: Any, native: Any) -> None:
    model = tools.decoder(torch.float32, **LATENT)
    for request in tools.requests([PROMPT], n=3, max_tokens=20):
        got = tools.run(PagedEngine(model, quantised=True), [request])[request.id]
        error = np.abs(got.logp - native.learner_logp(model, request, got))
        assert 0 < error.max() < 0.2
