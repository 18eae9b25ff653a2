"""A directory of a tiny random Qwen2.5-VL with a tokenizer and an image processor, as a published one has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.seeing_tokenizer import FRAME, IMAGE, VIDEO, seeing_tokenizer

PIXELS = {"min_pixels": 16 * 16, "max_pixels": 64 * 64}
"""Limits of its image processor; one token is 8 x 8 pixels."""


def write_tiny_seeing_model(directory: Path) -> Any:
    """Write the directory; returns the model of transformers."""
    tokenizer = seeing_tokenizer()
    tokenizer.save(directory)
    image, video, start, end = tokenizer._inner.convert_tokens_to_ids([IMAGE, VIDEO, *FRAME])
    text = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_ids[0],
        "pad_token_id": tokenizer.pad_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(directory)
    Qwen2VLImageProcessorPil(patch_size=4, **PIXELS).save_pretrained(directory)
    return model
