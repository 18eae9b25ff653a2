"""Resizing of images with pillow."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from burnish.config.errors import UserError
from burnish.config.extras import install_hint


class Resample(IntEnum):
    """Filters of pillow, by their numbers in a preprocessor_config.json."""

    NEAREST = 0
    LANCZOS = 1
    BILINEAR = 2
    BICUBIC = 3


def resized(image: np.ndarray, height: int, width: int, resample: Resample) -> np.ndarray:
    """An image, uint8 [H, W, 3], with another height and width."""
    if image.shape[:2] == (height, width):
        return image
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(f"images need pillow: {install_hint('vision')}") from error
    found: Any = Image.fromarray(np.ascontiguousarray(image)).resize((width, height), int(resample))
    return np.asarray(found)
