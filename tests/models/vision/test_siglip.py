"""SigLIP towers: features equal those of transformers for Idefics3, SmolVLM and Gemma 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from burnish.core.pictures import Picture
from burnish.models.vision import siglip
from burnish.models.vision.siglip import SiglipTower
from burnish.models.vision.siglip_shape import SiglipShape, gemma3_shape, idefics3_shape, why_unsupported
from burnish.models.vision.towers import build_tower

SIDE = 24
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": SIDE,
    "patch_size": 2,
}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


def of_transformers(family: str) -> tuple[Any, SiglipShape]:
    """A model of transformers with random weights, and the shape that we read from its config."""
    torch.manual_seed(0)
    if family == "gemma3":
        config = Gemma3Config(
            text_config=TEXT,
            vision_config={**VISION, "vision_use_head": False},
            mm_tokens_per_image=9,
            image_token_index=60,
        )
        model: Any = Gemma3ForConditionalGeneration(config)
        shape = gemma3_shape(config.to_dict(), TEXT["hidden_size"])
    else:
        configs, models = {
            "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
            "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
        }[family]
        config = configs(
            text_config={"model_type": "llama", **TEXT}, vision_config=VISION, image_token_id=60, scale_factor=3
        )
        model, shape = models(config), idefics3_shape(config.to_dict())
    assert why_unsupported(config.to_dict()) is None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.double().eval(), shape


def features_of(model: Any, pixels: Tensor) -> Tensor:
    """Features of transformers for normalised pixels [b, 3, h, w]."""
    inner = model.model
    if hasattr(inner, "connector"):
        return torch.cat(inner.get_image_features(pixels[None]).pooler_output)
    return inner.get_image_features(pixels).pooler_output.flatten(0, 1)


def our_tower(model: Any, shape: SiglipShape) -> SiglipTower:
    tower = build_tower(shape)
    assert isinstance(tower, SiglipTower)
    inner = model.model
    if shape.connector == "shuffle":
        parts = inner.vision_model, inner.connector.modality_projection
    else:
        parts = inner.vision_tower, inner.multi_modal_projector
    for ours, theirs in zip((tower.encoder, tower.connector), parts, strict=True):
        ours.load_state_dict(theirs.state_dict())
    return tower.double()


@pytest.mark.parametrize("family", ["idefics3", "smolvlm", "gemma3"])
def test_features_equal_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma3 import modeling_gemma3

    def norm(self: Any, x: Tensor) -> Tensor:  # theirs computes in float32
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", norm)
    model, shape = of_transformers(family)
    tower = our_tower(model, shape)
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)
    tokens = shape.tokens_per_side
    pictures = [Picture(image[None], (1, tokens, tokens)) for image in pixels]
    found = tower(pictures).embeddings
    normalised = ((torch.from_numpy(pixels).float() / 255 - 0.5) / 0.5).double().permute(0, 3, 1, 2)
    torch.testing.assert_close(found, features_of(model, normalised), rtol=1e-9, atol=1e-9)
    assert found.shape == (sum(picture.num_tokens for picture in pictures), TEXT["hidden_size"])
    alone = torch.cat([tower([picture]).embeddings for picture in pictures])
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(siglip, "MAX_PATCHES", 2 * (SIDE // 2) ** 2)
    with torch.no_grad():  # in batches of two
        torch.testing.assert_close(found, tower(pictures).embeddings, rtol=1e-9, atol=1e-9)
    assert sum(p.numel() for p in tower.parameters()) == shape.num_parameters
    assert sum(p.numel() for p in tower.projector.parameters()) == shape.num_projector_parameters


def test_a_picture_of_another_processor_is_refused() -> None:
    model, shape = of_transformers("idefics3")
    wrong = Picture(np.zeros((1, SIDE, 2 * SIDE, 3), dtype=np.uint8), (1, 4, 8))
    with pytest.raises(ValueError, match="processor of another model"):
        our_tower(model, shape)([wrong])


def test_towers_that_differ_are_not_supported() -> None:
    config = {"model_type": "idefics3", "vision_config": {**VISION, "hidden_act": "relu"}, "text_config": TEXT}
    assert "relu" in (why_unsupported(config) or "")
    config = {"model_type": "idefics3", "vision_config": {**VISION, "patch_size": 5}, "text_config": TEXT}
    assert "whole squares" in (why_unsupported(config) or "")
