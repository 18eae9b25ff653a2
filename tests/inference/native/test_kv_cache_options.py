"""The paged cache that the engine makes (as planned, of a given size, in 8 bits, before the first request), and weights in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.rollout import Rollout
from burnish.core.engine import Completion, Request
from burnish.distributed.engine_builder import build_engine, find_paged_engine
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.memory_plan.kv_cache import GIB, CachePlan
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer

TEXT = tuple((5 * i + i * i // 7) % 13 for i in range(200))


def policy_of(model: Decoder) -> PolicyModel:
    return PolicyModel(model, Tokenizer.from_characters("0123456789>"), None, "a test")


def built(model: Decoder, **settings: Any) -> PagedEngine:
    engine = find_paged_engine(build_engine(policy_of(model), Rollout(max_rows=4, **settings)))
    assert engine is not None
    return engine


def test_the_size_decides_the_number_of_blocks_and_whether_rows_are_set_aside(tools: Any, native: Any) -> None:
    model = tools.decoder()
    wanted = tools.requests([TEXT[:20], TEXT[30:60]], 2, max_tokens=60)
    block = 16 * 2 * 2 * 2 * 8 * 8  # tokens, keys and values, layers, heads, numbers, bytes
    found = []
    for blocks in (8, 12, 40):
        engine = built(model, cache_gib=blocks * block / GIB)
        native.agree(tools, model, tools.run(engine, wanted), wanted)
        assert engine.stats.plan is not None
        assert engine.stats.plan.num_blocks == engine.block_manager.num_usable + 1 == blocks
        found.append(engine.stats.preemptions)
    assert found[0] > found[2] == 0
    assert found[0] >= found[1]


def test_a_number_or_8_bits_choose_the_paged_cache_on_a_cpu(tools: Any) -> None:
    policy = policy_of(tools.decoder())
    assert isinstance(build_engine(policy, Rollout()), DenseEngine)
    assert isinstance(build_engine(policy, Rollout(cache_gib=0.1)), PagedEngine)
    assert isinstance(build_engine(policy, Rollout(cache_dtype="fp8")), PagedEngine)
    faulty = build_engine(policy, Rollout(cache_gib=0.1, mismatch={"name": "noise"}))  # type: ignore[arg-type]
    assert isinstance(find_paged_engine(faulty), PagedEngine)


def gap(tools: Any, native: Any, model: Decoder, engine: PagedEngine, wanted: list[Request]) -> np.ndarray:
    got: dict[str, Completion] = tools.run(engine, wanted)
    return np.concatenate([np.abs(got[r.id].logp - native.learner_logp(model, r, got[r.id])) for r in wanted])


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"window": 20}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8_bits_take_less_memory_and_leave_a_gap_that_shows(
    tools: Any, native: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model = tools.decoder(dtype, **options)
    wanted = tools.requests([TEXT[:40], TEXT[9:20], TEXT[:33]], 3, max_tokens=30)
    plain, small = built(model, cache_gib=0.01), built(model, cache_gib=0.01, cache_dtype="fp8")
    assert small.token_bytes == 2 * 2 * 2 * (8 + 4)
    assert plain.token_bytes == 2 * 2 * 2 * 8 * dtype.itemsize
    gaps = [gap(tools, native, model, engine, wanted) for engine in (plain, small)]
    assert gaps[0].mean() < (1e-5 if dtype == torch.float32 else 0.05)
    assert 1e-3 < gaps[1].mean() < 0.15
    assert small.stats.plan is not None
    assert small.stats.plan.num_blocks > plain.stats.plan.num_blocks  # type: ignore[union-attr]


def test_8_bits_are_shared_copied_and_recomputed_like_any(tools: Any, native: Any) -> None:
    """With shared prompts and preempted rows: the same tokens as in a large cache, and as alone."""
    model = tools.decoder(torch.float32)
    wanted = tools.requests([TEXT[:20], TEXT[:37]], 3, max_tokens=40)
    roomy = tools.run(PagedEngine(model, 6, quantised=True), wanted)
    engine = PagedEngine(model, 6, num_blocks=1 + 10, quantised=True)
    tight = tools.run(engine, wanted)
    assert engine.stats.preemptions > 0
    native.no_block_is_held(engine)
    same = [roomy[r.id].tokens.tolist() == tight[r.id].tokens.tolist() for r in wanted]
    assert sum(same) >= 5, "a row computed again may round a key the other way"
    for request in wanted[:2]:
        alone = tools.run(PagedEngine(model, 1, quantised=True), [replace(request, id="alone")])["alone"]
        np.testing.assert_allclose(alone.logp, roomy[request.id].logp, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exact": True, "cache_dtype": "fp8"}, "the learner has no cache to round"),
        ({"engine": "transformers", "cache_gib": 1.0}, "apply to the native engine"),
        ({"engine": "transformers", "cache_dtype": "fp8"}, "apply to the native engine"),
        ({"cache_gib": 0.0}, "greater than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rollout(**settings)


def test_a_model_of_transformers_has_no_such_cache() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from burnish.models.transformers_model import TransformersPolicy

    config = GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    policy = PolicyModel(TransformersPolicy(GPT2LMHeadModel(config)), Tokenizer.from_characters("0123"), None, "a test")
    for settings in ({"cache_gib": 1.0}, {"cache_dtype": "fp8"}):
        with pytest.raises(UserError, match="need the native decoder"):
            build_engine(policy, Rollout(**settings))  # type: ignore[arg-type]


def test_the_engine_makes_the_cache_it_plans_and_says_so(tools: Any) -> None:
    model = tools.decoder()
    heard: list[CachePlan] = []
    engine = PagedEngine(model, max_rows=3, on_cache=heard.append)
    assert engine.stats.plan is None
    tools.run(engine, tools.requests([(3,) * 20], max_tokens=20))
    assert heard == [engine.plan(40)] == [engine.stats.plan]
    cache = engine.runner.cache
    assert heard[0].bytes == cache.numel() * cache.element_size()
    assert heard[0].num_blocks == cache.shape[2] == 3 * 3 + 1
    tools.run(engine, tools.requests([(3,) * 200], max_tokens=20))
    assert [plan.blocks_per_row for plan in heard] == [3, 14]


def test_a_prepared_engine_makes_nothing_on_the_way(tools: Any, native: Any) -> None:
    model = tools.decoder()
    heard: list[CachePlan] = []
    engine = PagedEngine(model, max_rows=2, on_cache=heard.append)
    wanted = tools.requests([(3,) * 20, (4,), (5, 6)], max_tokens=30)
    engine.prepare(50, 3, wanted[0].sampling)
    address = engine.runner.cache.data_ptr()
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    assert len(heard) == 1
    assert engine.runner.cache.data_ptr() == address
    with pytest.raises(UserError, match="the KV cache"):
        PagedEngine(model, max_rows=2, num_blocks=3).prepare(100, 2, wanted[0].sampling)


def test_a_reserved_cache_is_made_at_once_and_stays(tools: Any, native: Any) -> None:
    model = tools.decoder()
    heard: list[CachePlan] = []
    engine = PagedEngine(model, max_rows=2, on_cache=heard.append)
    engine.reserve(100)
    address = engine.runner.cache.data_ptr()
    wanted = tools.requests([(3,) * 20, (4,)], max_tokens=60)
    native.agree(tools, model, tools.run(engine, wanted), wanted)
    assert len(heard) == 1
    assert engine.runner.cache.data_ptr() == address
    with pytest.raises(UserError, match=r"the KV cache: .* needs 7"):
        PagedEngine(model, max_rows=2, num_blocks=7).reserve(100)
