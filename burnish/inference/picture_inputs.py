"""Pictures of requests as the inputs of vLLM and SGLang, which expand and resize images by themselves.

They get the prompt with one mark for each image and the image as we resized it, which is a size that their processors leave as it is.
Engine and learner must see the same tokens: `check_expansion` compares the length of the expanded prompt with ours.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.config.extras import install_hint
from burnish.core.engine import Request
from burnish.core.pictures import PictureSpan

if TYPE_CHECKING:
    from PIL.Image import Image

NEVER_BIAS = -100.0
"""Logit bias of placeholder tokens, which must not be drawn."""


def check_images_only(request: Request, engine: str) -> None:
    """Raise for a request with videos: an engine samples their frames in its own way."""
    for number, (_, picture) in enumerate(request.pictures, 1):
        if picture.is_video or len(picture.pixels) > 1:
            raise UserError(
                f"request {request.id}: picture {number} is a video, and burnish sends {engine} images only; use rollout.engine=native"
            )


def marked_tokens(tokens: Sequence[int], spans: Sequence[PictureSpan]) -> list[int]:
    """The tokens with one placeholder in place of all placeholders of each image."""
    found: list[int] = []
    end = 0
    for span in spans:
        found += [*tokens[end : span.start], tokens[span.start]]
        end = span.end
    return [*found, *tokens[end:]]


def placeholder_bias(request: Request) -> dict[int, float]:
    """A logit bias that keeps an engine from drawing the placeholders of the request's images."""
    return {request.tokens[span.start]: NEVER_BIAS for span in request.pictures}


def pil_images(spans: Sequence[PictureSpan]) -> list[Image]:
    """The images of spans."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(f"images for vLLM and SGLang need pillow: {install_hint('vision')}") from error
    return [Image.fromarray(span.picture.pixels[0]) for span in spans]


def data_urls(spans: Sequence[PictureSpan]) -> list[str]:
    """The images of spans as data URLs with PNG files, which lose nothing."""
    found = []
    for image in pil_images(spans):
        content = io.BytesIO()
        image.save(content, "PNG")
        found.append("data:image/png;base64," + base64.b64encode(content.getvalue()).decode())
    return found


def check_expansion(request: Request, num_tokens: int, found: Any, engine: str) -> None:
    """Raise unless an engine's expanded prompt has the length `num_tokens` of ours."""
    if found is not None and int(found) != num_tokens:
        raise UserError(
            f"request {request.id}: {engine} reads its prompt with {len(request.pictures)} images as {found} tokens, and burnish as {num_tokens}: "
            "it resizes images by other limits; set data.image_pixels within those of the engine, or use rollout.engine=native"
        )
