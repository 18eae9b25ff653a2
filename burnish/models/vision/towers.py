"""`build_tower`: the vision tower of an architecture, by the type of its shape."""

from __future__ import annotations

from burnish.models.vision.interfaces import VisionShape, VisionTower


def build_tower(shape: VisionShape, hidden_size: int) -> VisionTower:
    """A tower with a projector to the decoder's `hidden_size`, with uninitialised weights."""
    raise TypeError(f"there is no tower for {type(shape).__name__}")
