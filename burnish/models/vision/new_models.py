"""A small vision-language model from nothing: the tower, the tokens and the files of `model.new` with the family qwen3_vl.

The tower is Qwen3-VL's with half of the decoder's width, as many layers and heads, patches of 8 x 8 pixels and one token for every 16 x 16.
It has 8 x 8 learned positions, which are interpolated, and no deep-stack. A saved model is a directory of Qwen3-VL like any other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from burnish.config.errors import UserError
from burnish.config.model import NewModel
from burnish.models.vision.axis_rotation import AxisRotation
from burnish.models.vision.interfaces import PixelLimits
from burnish.models.vision.qwen_processor import Encode, QwenProcessor
from burnish.models.vision.qwen_shape import HALF, QwenVisionShape

NEW_VISION_FAMILY = "qwen3_vl"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens of a new model that sees. They stand behind `<pad>` and `<eos>`."""
FIRST_VISION_TOKEN = 2
PATCH_SIZE, MERGE_SIZE = 8, 2
SIDE = PATCH_SIZE * MERGE_SIZE
"""Pixels on the side of one token."""
NUM_POSITIONS = 64
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 1024 * SIDE * SIDE},
    "patch_size": PATCH_SIZE,
    "merge_size": MERGE_SIZE,
    "temporal_patch_size": 2,
    "image_mean": list(HALF),
    "image_std": list(HALF),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'text' %}{{ block.text }}{% else %}<|vision_start|>{% if block.type == 'image' %}<|image_pad|>{% else %}<|video_pad|>"
    "{% endif %}<|vision_end|>{% endif %}{% endfor %}{% endif %}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""Contents alone, one after the other; an answer ends with the end token."""


def new_vision_shape(new: NewModel) -> QwenVisionShape:
    """The tower of a new model."""
    width = new.hidden_size // 2
    if new.hidden_size % (8 * new.num_heads):
        raise UserError(
            f"model.new: the tower of {NEW_VISION_FAMILY} has half of the decoder's width, in heads of a multiple of 4: hidden_size "
            f"{new.hidden_size} should be a multiple of 8 times num_heads {new.num_heads}"
        )
    frequencies = new.hidden_size // new.num_heads // 2
    side = frequencies // 3
    start, end, image, video = range(FIRST_VISION_TOKEN, FIRST_VISION_TOKEN + len(VISION_TOKENS))
    return QwenVisionShape(
        hidden_size=width,
        num_layers=new.num_layers,
        num_heads=new.num_heads,
        mlp_size=2 * width,
        out_size=new.hidden_size,
        patch_size=PATCH_SIZE,
        temporal_patch_size=2,
        merge_size=MERGE_SIZE,
        rotation=AxisRotation((frequencies - 2 * side, side, side), is_interleaved=True),
        image_token=image,
        video_token=video,
        vision_start=start,
        vision_end=end,
        num_position_embeddings=NUM_POSITIONS,
        activation="gelu_pytorch_tanh",
    )


def new_processor(shape: QwenVisionShape, encode: Encode, image_pixels: Sequence[int] | None) -> QwenProcessor:
    """The image processor of a new model."""
    limits = PixelLimits() if image_pixels is None else PixelLimits(*image_pixels)
    return QwenProcessor(PREPROCESSOR, {}, shape, encode, limits, "model.new")


def processor_files() -> dict[str, str]:
    """The files of a saved model that say how images are resized, by name."""
    return {"preprocessor_config.json": json.dumps(PREPROCESSOR, indent=2) + "\n"}
