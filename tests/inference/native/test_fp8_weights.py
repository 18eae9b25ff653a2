"""Engines that multiply by 8-bit copies of the weights: their numbers, new weights, adapters, and the correction that comes with them."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import Lora
from burnish.config.recipe_names import recipe_path
from burnish.config.rollout import Fp8Weights, Rollout
from burnish.config.schema import TrainConfig
from burnish.distributed.engine_builder import build_engine, find_paged_engine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder
from burnish.models.kernels.fp8 import dequantised, quantise_rows
from burnish.models.layer_products import Fp8Products, fp8_copy_bytes
from burnish.models.lora.adapters import LoraLinear, add_lora
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer

PROMPTS = [tuple((5 * i + i * i // 7) % 13 for i in range(length)) for length in (40, 11, 23)]


def rounded(x: Tensor) -> Tensor:
    return dequantised(quantise_rows(x), x.dtype)


def rounded_model(model: Decoder) -> Decoder:
    """The same model with the matrices of the MLPs, and what they multiply, rounded to 8 bits by other code."""
    other = copy.deepcopy(model)
    for layer in other.layers:
        for linear in (layer.gate_up, layer.down):
            linear.weight.data = rounded(linear.weight.data)
            linear.register_forward_pre_hook(lambda module, inputs: (rounded(inputs[0]),))
    return other


def gaps(tools: Any, native: Any, engine: PagedEngine, *models: Decoder) -> list[np.ndarray]:
    """Differences of an engine's log-probs from those of models, for the tokens that the engine drew."""
    wanted = tools.requests(PROMPTS, 2, max_tokens=30)
    got = tools.run(engine, wanted)
    return [
        np.concatenate([np.abs(got[r.id].logp - native.learner_logp(model, r, got[r.id])) for r in wanted])
        for model in models
    ]


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"mlp_bias": True}], ids=str)
def test_the_engine_samples_from_the_rounded_model(tools: Any, native: Any, options: dict[str, Any]) -> None:
    model = tools.decoder(torch.float32, **options)
    engine = PagedEngine(model, 4, weights="fp8")
    to_rounded, to_model = gaps(tools, native, engine, rounded_model(model), model)
    assert np.median(to_rounded) < 1e-5
    assert to_rounded.mean() < 0.1 * to_model.mean(), "a rounding may go the other way here and there"
    assert to_model.mean() > 1e-3


def test_new_weights_are_quantised_when_they_are_loaded(tools: Any, native: Any) -> None:
    model = tools.decoder(torch.float32)
    engine = PagedEngine(model, 4, weights="fp8")
    gaps(tools, native, engine, model)
    with torch.no_grad():
        for layer in model.layers:
            layer.gate_up.weight.mul_(-1.5)
    assert np.median(gaps(tools, native, engine, rounded_model(model))[0]) > 1e-3
    engine.load(1, ())
    assert np.median(gaps(tools, native, engine, rounded_model(model))[0]) < 1e-5
    down = model.layers[0].down.weight.detach().clone()
    engine.load(2, [("layers.0.down.weight", 2 * down)])
    assert np.median(gaps(tools, native, engine, rounded_model(model))[0]) < 1e-5


def test_adapters_are_added_in_the_model_s_type(tools: Any) -> None:
    model = tools.decoder(torch.float32)
    add_lora(model, Lora(rank=4), seed=0)
    products, layer = Fp8Products(model, min_projection=0), model.layers[0]
    assert len(products.modules) == 4 * len(model.layers)
    for module in (layer.qkv, layer.gate_up, layer.down):
        assert isinstance(module, LoraLinear)
        nn.init.normal_(module.lora_b)
        x = torch.randn(5, module.in_features)
        frozen = rounded(x) @ rounded(module.weight.detach()).T + (0 if module.bias is None else module.bias)
        with torch.no_grad():
            adapted = module(x) - nn.functional.linear(x, module.weight, module.bias)
            found = products.into_residual(module, x)
            module.is_on = False
            assert torch.allclose(products.into_residual(module, x), frozen, atol=1e-5)
            module.is_on = True
        assert torch.allclose(found, frozen + adapted, atol=1e-5)


def test_the_plan_counts_the_copies(tools: Any) -> None:
    model = tools.decoder(torch.float32)
    held = Fp8Products(model).matrices.values()
    assert fp8_copy_bytes(model) == sum(m.data.numel() + 4 * m.scale.numel() for m in held)


def test_a_run_samples_with_them_and_corrects_the_gap(tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = PolicyModel(tools.decoder(), Tokenizer.from_characters("0123456789>"), None, "a test")
    engine = find_paged_engine(build_engine(policy, Rollout(weights=Fp8Weights())))
    assert engine is not None
    assert isinstance(engine.products, Fp8Products)
    caplog.set_level(logging.WARNING)
    recipe = recipe_path("sort_digits")
    for settings in (
        ["rollout.weights=fp8"],
        ["rollout.cache_dtype=fp8"],
        ["rollout.engine=vllm", "rollout.vllm.engine={quantization: fp8}"],
    ):
        caplog.clear()
        config = load(TrainConfig, recipe, settings).config
        assert config.algorithm.correction.name == "decoupled"
        assert config.algorithm.correction.acts
        assert "algorithm.correction=none to only measure it" in caplog.text
    caplog.clear()
    for overrides in (["rollout.weights=model"], ["algorithm.correction=none"], ["algorithm.correction=seed"]):
        kept = load(TrainConfig, recipe, ["rollout.weights=fp8", *overrides]).config
        assert kept.algorithm.correction.name == ("seed" if "seed" in overrides[0] else "none")
    assert not caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exact": True}, "the learner's weights are not rounded"),
        ({"engine": "transformers"}, "applies to the native engine"),
        ({"engine": "vllm"}, "rollout.vllm.engine.quantization=fp8"),
    ],
)
def test_what_cannot_be_done_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rollout(weights=Fp8Weights(), **settings)


def test_models_without_such_products_are_refused(tools: Any) -> None:
    model = tools.decoder()
    add_lora(model, Lora(rank=4, base="nf4"), seed=0)
    with pytest.raises(UserError, match="4 bits already"):
        PagedEngine(model, 4, weights="fp8")
