"""Tiny random image-text models of transformers, saved as Hugging Face directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from burnish.core.pictures import Picture
from tests.models.conftest import randomise

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOKENS = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
# A window has 2 x 2 tokens of 8 x 8 pixels; the second layer attends to a whole frame.
QWEN25 = {"depth": 3, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 4}
QWEN3 = {"depth": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2, 3]}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
TinyVision = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="session")
def tiny_vision(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    """`tiny_vision(family, dtype)`: a transformers model and the directory it was saved to, created once."""
    made: dict[tuple[str, torch.dtype], tuple[Any, Path]] = {}

    def build(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
        if (family, dtype) not in made:
            if family == "qwen2_5_vl":
                text = TEXT | {"rope_parameters": SECTIONS}
                config: Any = transformers.Qwen2_5_VLConfig(
                    text_config=text, vision_config=VISION | QWEN25, **TOKENS, tie_word_embeddings=False
                )
                kind: Any = transformers.Qwen2_5_VLForConditionalGeneration
            else:
                text = TEXT | {
                    "head_dim": 12,
                    "rope_parameters": SECTIONS | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
                }
                config = transformers.Qwen3VLConfig(
                    text_config=text, vision_config=VISION | QWEN3, **TOKENS, tie_word_embeddings=True
                )
                kind = transformers.Qwen3VLForConditionalGeneration
            model = kind(config).to(dtype).eval()
            randomise(model)
            directory = tmp_path_factory.mktemp(family)
            model.save_pretrained(directory)
            made[family, dtype] = (model, directory)
        return made[family, dtype]

    return build


def random_picture(grid: tuple[int, int, int], seed: int, seconds: float | None = None, frames: int = 1) -> Picture:
    """Random pixels for a grid of tokens with 8 x 8 pixels each."""
    shape = (frames, grid[1] * 8, grid[2] * 8, 3)
    return Picture(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), grid, seconds)
