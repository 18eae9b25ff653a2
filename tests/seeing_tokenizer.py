"""A tokenizer of a vision-language model, made by tests: bytes, Qwen's chat template for images, one token for each 8 x 8 patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from burnish.core.pictures import Picture, PictureSpan
from burnish.models.tokenizer import Tokenizer
from burnish.models.vision.interfaces import Expansion
from tests.made_tokenizers import byte_level

PATCH = 8
FRAME = ("<|vision_start|>", "<|vision_end|>")
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
MARKS = ["<|im_start|>", "<|im_end|>", *FRAME, IMAGE, VIDEO]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS_ONLY = CHAT.replace("{% if m.content is string %}{{ m.content }}{% else %}", "").replace(
    "{% endfor %}{% endif %}<|im_end|>", "{% endfor %}<|im_end|>"
)
"""As SmolVLM's: a content that is a plain text is not written."""


class Patches:
    """Cuts an image to whole patches; each is one placeholder token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.image_mark, self.video_mark = tokens
        self.placeholder_tokens = frozenset(tokens)
        self.texts_around: Mapping[int, tuple[str, str]] = {}

    def image(self, image: np.ndarray) -> Expansion:
        return self._expanded(self.image_mark, image[None], None)

    def video(self, frames: Sequence[np.ndarray], frames_per_second: float) -> Expansion:
        return self._expanded(self.video_mark, np.stack(list(frames)), 1 / frames_per_second)

    def _expanded(self, mark: int, frames: np.ndarray, seconds: float | None) -> Expansion:
        rows, columns = frames.shape[1] // PATCH, frames.shape[2] // PATCH
        picture = Picture(frames[:, : rows * PATCH, : columns * PATCH], (len(frames), rows, columns), seconds)
        return Expansion([mark] * picture.num_tokens, (PictureSpan(0, picture),))


def seeing_tokenizer(template: str | None = CHAT) -> Tokenizer:
    made = byte_level(eos="<|im_end|>", chat_template=template, additional_special_tokens=MARKS)
    inner: Any = made._inner
    return Tokenizer(inner, image_processor=Patches(inner.convert_tokens_to_ids([IMAGE, VIDEO])))


def scene(height: int = 16, width: int = 24, seed: int = 0) -> np.ndarray:
    """An image of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
