"""Which layers keep keys and values in 8 bits: the estimated error of a score, and an engine with a layer that does not."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.rollout import Rollout
from burnish.core.engine import Request
from burnish.distributed.engine_builder import build_parallel_engine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder, Layer
from burnish.models.kernels.fp8 import Fp8Rows, dequantised, quantise_rows
from burnish.models.key_rounding import MAX_SCORE_ERROR, eight_bit_layers, score_error

BIAS = 300.0
"""Qwen2.5-1.5B has biases of this size in the keys of its first layer."""


def with_large_keys(model: Decoder, index: int) -> Decoder:
    """The model with a large bias of two numbers of the key heads of a layer."""
    layer, arch = cast(Layer, model.layers[index]), model.arch
    with torch.no_grad():
        keys = layer.qkv.bias[arch.num_heads * arch.head_dim :].view(-1, arch.head_dim)  # type: ignore[union-attr, index]
        keys[: arch.num_kv_heads, 1] = BIAS
        keys[: arch.num_kv_heads, 2] = -BIAS
    return model


@pytest.mark.parametrize("options", [{"qkv_bias": True}, {"qk_norm": True}, {"num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("is_large", [False, True])
def test_the_estimate_is_the_error_of_rounded_keys(tools: Any, options: dict[str, Any], is_large: bool) -> None:
    options = options | {"head_dim": 64, "hidden_size": 96}
    model = tools.decoder(torch.float32, **options)
    layer, arch = cast(Layer, model.layers[1]), model.arch
    if is_large and arch.qk_norm:
        with torch.no_grad():
            layer.k_norm.weight[3:9] = 150.0
    elif is_large and arch.qkv_bias:
        with_large_keys(model, 1)
    torch.manual_seed(0)
    x = torch.randn(600, arch.hidden_size)
    cos, sin = (table[:600] for table in model.rotations(600, 1))
    with torch.no_grad():
        qk, _ = layer.split_heads(layer.qkv(layer.attention_norm(x)))
        q, k = layer.rotate_heads(qk, cos, sin).split([arch.num_heads, arch.num_kv_heads], 1)
        rounded = dequantised(quantise_rows(k.contiguous()), torch.float32)
        groups = arch.num_heads // arch.num_kv_heads
        wrong = torch.einsum("qhd,khd->hqk", q, (rounded - k).repeat_interleave(groups, 1)) * arch.head_dim**-0.5
    measured = float(wrong.square().mean((1, 2)).amax().sqrt())
    assert (
        0.8 < score_error(layer) / measured < 2.5
    )  # the largest number of a key is exact, so one large number alone does little harm
    assert (measured > MAX_SCORE_ERROR) == (is_large and "num_kv_heads" not in options)


def test_a_layer_with_large_keys_is_not_in_8_bits(tools: Any, native: Any) -> None:
    model = with_large_keys(tools.decoder(torch.float32, num_layers=3, qkv_bias=True), 1)
    assert eight_bit_layers(model) == (True, False, True)
    engine = PagedEngine(model, 4, quantised=True)
    heads = 2 * model.arch.num_kv_heads
    assert engine.token_bytes == heads * (2 * (model.arch.head_dim + 4) + 4 * model.arch.head_dim)
    wanted = tools.requests([(3, 1, 4, 1, 5, 9, 2, 6) * 6, (2, 7, 1)], 2, max_tokens=30)
    mixed = gap(tools, native, model, engine, wanted)
    cache = engine.runner.cache
    assert [isinstance(cache[layer][0], Fp8Rows) for layer in range(3)] == [True, False, True]
    assert engine.stats.plan is not None
    assert "layers 1 are not in 8 bits" in engine.stats.plan.text
    engine.in_8_bits, engine._runner = (True, True, True), None
    broken = gap(tools, native, model, engine, wanted)
    assert broken > 1.5 * mixed


def gap(tools: Any, native: Any, model: Decoder, engine: PagedEngine, wanted: list[Request]) -> float:
    """Mean distance of the engine's log-probs from the learner's."""
    got = tools.run(engine, wanted)
    return float(
        np.concatenate([np.abs(got[r.id].logp - native.learner_logp(model, r, got[r.id])) for r in wanted]).mean()
    )


def test_an_engine_of_several_ranks_refuses_keys_with_a_bias(tools: Any) -> None:
    with pytest.raises(UserError, match="keys of this model have a bias"):
        build_parallel_engine(tools.decoder(qkv_bias=True), Rollout(cache_dtype="fp8"), str)
