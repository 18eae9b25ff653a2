"""What generated tasks with pictures share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.data.images import ImageInput
from burnish.data.row import Message

if TYPE_CHECKING:
    import numpy as np

LEAST_SIDE, MOST_SIDE = 16, 1024
PRINTABLE = "".join(map(chr, range(32, 127)))
"""The alphabet of prompts in words."""
CELLS = "ABCDEFGHI"
"""Names of the cells of a picture in reading order, in demonstrations that say what they see before they answer."""
EMPTY = ".."
"""What such demonstrations say of an empty cell."""
RESULT = "="
"""What stands between what is seen and the answer."""


def picture_prompt(image: np.ndarray, text: str) -> list[Message]:
    """Return a prompt of one message: a picture, then a text."""
    return [{"role": "user", "content": picture_between("", image, text)}]


def picture_between(before: str, image: np.ndarray, behind: str) -> list[dict[str, Any]]:
    """Return the content of a message: a picture between two texts, each of which may be empty."""
    shown: dict[str, Any] = {"type": "image", "image": ImageInput(image)}
    texts: list[list[dict[str, Any]]] = [[{"type": "text", "text": text}] if text else [] for text in (before, behind)]
    return [*texts[0], shown, *texts[1]]


def check_side(where: str, side: Any) -> None:
    """Raise a UserError unless the side of a picture is a whole number of pixels that can be drawn."""
    if isinstance(side, bool) or not isinstance(side, int) or not LEAST_SIDE <= side <= MOST_SIDE:
        raise UserError(
            f"{where}: side should be a whole number of pixels from {LEAST_SIDE} to {MOST_SIDE}, got {side!r}"
        )


def image_as_url(value: Any) -> str:
    """Return an image as a `data:` URL: the argument `default` of `json.dumps` for rows with images."""
    if not isinstance(value, ImageInput):
        raise TypeError(f"{type(value).__name__} is not a value of JSON")
    return value.data_url()
