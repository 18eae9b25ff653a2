"""`load_processor`: the image processor of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from burnish.models.vision.interfaces import ImageProcessor


class PixelLimits(NamedTuple):
    """Pixels of a resized image, at least and at most; None has the limit of the model's own processor."""

    least: int | None = None
    most: int | None = None


MODEL_LIMITS = PixelLimits()


def load_processor(directory: Path, limits: PixelLimits = MODEL_LIMITS) -> ImageProcessor | None:
    """The processor of a directory's model; None for a text model."""
    return None
