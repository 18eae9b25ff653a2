"""Tiny random models of transformers with a SigLIP tower: Idefics3, SmolVLM and Gemma 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers

from burnish.core.pictures import Picture, PictureSpan
from tests.models.conftest import randomise

SIDE, PLACEHOLDER = 24, 60
TOKENS_PER_SIDE = {"idefics3": 4, "smolvlm": 4, "gemma3": 3}
FAMILIES = list(TOKENS_PER_SIDE)
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": SIDE,
    "patch_size": 2,
}
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
Row = tuple[list[int], tuple[PictureSpan, ...]]


def siglip_model(family: str) -> Any:
    """A model of transformers with random weights. Gemma 3 has layers with a window shorter than a picture, and full ones."""
    if family == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        config: Any = transformers.Gemma3Config(
            text_config=TEXT | {"sliding_window": 7, "layer_types": layers, "query_pre_attn_scalar": 8},
            vision_config=VISION | {"vision_use_head": False},
            mm_tokens_per_image=9,
            image_token_index=PLACEHOLDER,
            boi_token_index=61,
            eoi_token_index=62,
        )
        model: Any = transformers.Gemma3ForConditionalGeneration(config)
    else:
        configs, models = {
            "idefics3": (transformers.Idefics3Config, transformers.Idefics3ForConditionalGeneration),
            "smolvlm": (transformers.SmolVLMConfig, transformers.SmolVLMForConditionalGeneration),
        }[family]
        text = TEXT | {"model_type": "llama"}
        config = configs(text_config=text, vision_config=VISION, image_token_id=PLACEHOLDER, scale_factor=3)
        model = models(config)
    randomise(model)
    return model.eval()


def random_picture(family: str, seed: int) -> Picture:
    side = TOKENS_PER_SIDE[family]
    pixels = np.random.default_rng(seed).integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8)
    return Picture(pixels, (1, side, side))


def row(seed: int, *parts: int | Picture) -> Row:
    """Random text tokens in the given numbers, with the placeholders of pictures between them."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, Picture):
            spans.append(PictureSpan(len(tokens), part))
            tokens += [PLACEHOLDER] * part.num_tokens
        else:
            tokens += random.integers(2, 59, part).tolist()
    return tokens, tuple(spans)


def rows_of(family: str) -> list[Row]:
    """One image, several images, text only, and an image at both ends."""
    first, second = random_picture(family, 1), random_picture(family, 2)
    return [row(0, 5, first, 7), row(1, 1, second, 3, first, 1, second, 6), row(2, 8), row(3, first, 20, second, 1)]
