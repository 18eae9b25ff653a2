"""Images among the values that environments and tools give and get.

User code gives an image as a uint8 array [height, width, 3], as a PIL image, or in a content block as the bytes or the path of a file. Between
processes an image is JSON: its bytes, or its pixels compressed without loss. This module imports numpy only where there is an image, because
worker processes start fast without it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.data.images import ImageInput, VideoInput
    from burnish.data.row import Message

IMAGE_TYPES, VIDEO_TYPES = ("image", "image_url"), ("video",)
COMPRESSION = 1


def is_image(value: Any) -> bool:
    """Whether a value is an image: a PIL image, or a uint8 array [height, width, 3]."""
    if type(value).__module__.partition(".")[0] == "PIL":
        return hasattr(value, "convert")
    shape = getattr(value, "shape", None)
    is_array = isinstance(shape, tuple) and len(shape) == 3 and shape[2] == 3
    return is_array and str(getattr(value, "dtype", "")) == "uint8" and hasattr(value, "tobytes")


def are_content_parts(value: Any) -> bool:
    """Whether a value is a content of blocks, as TRL and OpenAI's API have it."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(
            isinstance(part, Mapping) and part.get("type") in ("text", *IMAGE_TYPES, *VIDEO_TYPES) for part in value
        )
    )


def split_parts(parts: Sequence[Mapping[str, Any]], where: str) -> tuple[str, tuple[Any, ...]]:
    """Return the text and the images of content blocks."""
    if videos := [part for part in parts if part.get("type") in VIDEO_TYPES]:
        raise UserError(f"{where} has {len(videos)} videos; give some of their frames as images")
    texts = [str(part["text"]) for part in parts if part.get("type") == "text"]
    images = [part.get(part["type"], part.get("image")) for part in parts if part.get("type") in IMAGE_TYPES]
    return "".join(texts), tuple(images)


def content_with_images(text: str, images: Sequence[Any]) -> str | list[Message]:
    """Return the content of a message: a text, or blocks with the images behind it."""
    if not images:
        return text
    words: list[Message] = [{"type": "text", "text": text}] if text else []
    return words + [{"type": "image", "image": image} for image in images]


def image_digest(value: Any) -> str:
    """Return the hash of an image, equal for equal pixels."""
    from burnish.data.images import image_input

    return image_input(value, "an observation").digest


def joined_content(before: Any, after: Any, joint: str = "") -> str | list[Message]:
    """Return two contents as one, each a text or blocks, with a text between them."""
    if isinstance(before, str) and isinstance(after, str):
        return before + joint + after
    blocks = [[{"type": "text", "text": one}] if isinstance(one, str) else list(one) for one in (before, joint, after)]
    return [block for part in blocks for block in part if block.get("text") != ""]


# --- between processes -----------------------------------------------------------------------------------------------


def image_to_json(value: Any, where: str) -> dict[str, Any]:
    """Return an image as JSON: `shape` and compressed pixels, or the bytes of a file."""
    from pathlib import Path

    import numpy as np

    from burnish.data.images import image_input

    content = image_input(value, where).content
    if isinstance(content, Path):
        return {"path": str(content)}
    if isinstance(content, np.ndarray):
        data = zlib.compress(content.tobytes(), COMPRESSION)
        return {"shape": list(content.shape), "data": base64.b64encode(data).decode()}
    return {"data": base64.b64encode(content).decode()}


def image_from_json(encoded: Mapping[str, Any]) -> ImageInput:
    """Inverse of `image_to_json`."""
    import math
    from pathlib import Path

    import numpy as np

    from burnish.data.images import MAX_SOURCE_PIXELS, ImageInput

    if "path" in encoded:
        return ImageInput(Path(encoded["path"]), "an image of the environment")
    data = base64.b64decode(encoded["data"])
    if "shape" not in encoded:
        return ImageInput(data, "an image of the environment")
    size = math.prod(encoded["shape"])
    if size > 3 * MAX_SOURCE_PIXELS:
        raise ValueError(f"an image of shape {encoded['shape']}; the limit is {MAX_SOURCE_PIXELS:,} pixels")
    # A few bytes can expand to gigabytes, so no more than the image is taken.
    pixels = np.frombuffer(zlib.decompressobj().decompress(data, size), dtype=np.uint8)
    return ImageInput(pixels.reshape(encoded["shape"]).copy(), "an image of the environment")


def video_to_json(value: VideoInput, where: str) -> dict[str, Any]:
    """Return a video of a row as JSON."""
    frames = value.frames if isinstance(value.frames, tuple) else [value.frames]
    return {
        "frames": [image_to_json(frame, where) for frame in frames],
        "is_file": not isinstance(value.frames, tuple),
        "fps": value.frames_per_second,
    }


def video_from_json(encoded: Mapping[str, Any]) -> VideoInput:
    """Inverse of `video_to_json`."""
    from burnish.data.images import VideoInput

    frames = tuple(image_from_json(frame) for frame in encoded["frames"])
    return VideoInput(frames[0] if encoded["is_file"] else frames, encoded["fps"], "a video of the environment")
