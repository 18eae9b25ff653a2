"""SigLIP towers: features equal those of transformers for Idefics3, SmolVLM and Gemma 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.core.pictures import Picture
from burnish.models.vision import siglip
from burnish.models.vision.siglip import SiglipTower
from burnish.models.vision.siglip_shape import SiglipShape, gemma3_shape, idefics3_shape, why_unsupported
from burnish.models.vision.towers import build_tower
from tests.models.vision.tiny_siglip import FAMILIES, SIDE, TEXT, VISION, random_picture, siglip_model


def of_transformers(family: str) -> tuple[Any, SiglipShape]:
    """A model of transformers with random weights, and the shape that we read from its config."""
    model = siglip_model(family)
    config = model.config.to_dict()
    assert why_unsupported(config) is None
    return model.double(), (gemma3_shape if family == "gemma3" else idefics3_shape)(config)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma3 import modeling_gemma3

    def norm(self: Any, x: Tensor) -> Tensor:  # theirs computes in float32
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", norm)
    model, shape = of_transformers(family)
    tower = our_tower(model, shape)
    pictures = [random_picture(family, seed) for seed in range(3)]
    pixels = np.concatenate([picture.pixels for picture in pictures])
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
