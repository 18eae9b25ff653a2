"""`build_tower`: the vision tower of an architecture, by the type of its shape."""

from __future__ import annotations

from burnish.models.vision.interfaces import VisionShape, VisionTower
from burnish.models.vision.qwen_shape import QwenVisionShape
from burnish.models.vision.qwen_tower import QwenTower
from burnish.models.vision.siglip import SiglipTower
from burnish.models.vision.siglip_shape import SiglipShape


def build_tower(shape: VisionShape) -> VisionTower:
    """A tower with its projector, with uninitialised weights."""
    if isinstance(shape, QwenVisionShape):
        return QwenTower(shape)
    if isinstance(shape, SiglipShape):
        return SiglipTower(shape)
    raise TypeError(f"there is no tower for {type(shape).__name__}")
