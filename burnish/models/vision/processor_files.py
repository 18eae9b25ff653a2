"""The files of an image processor in a saved model: those of the model's directory, or new ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.models.vision.interfaces import VisionShape
from burnish.models.vision.qwen_processor import IMAGE_LIMITS
from burnish.models.vision.qwen_shape import QwenVisionShape
from burnish.run.checkpoint.snapshot import BytesFile

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def processor_contents(shape: VisionShape | None, source: Path | None) -> list[BytesFile]:
    """The files that say how a model's images are resized; none for a text model."""
    if shape is None:
        return []
    if source is not None:
        return [BytesFile(name, (source / name).read_bytes()) for name in PROCESSOR_FILES if (source / name).is_file()]
    return [BytesFile(PROCESSOR_FILES[0], json.dumps(new_processor_config(shape), indent=1))]


def new_processor_config(shape: VisionShape) -> dict[str, Any]:
    """The preprocessor_config.json of a model that was created here."""
    if not isinstance(shape, QwenVisionShape):
        raise TypeError(f"there is no new image processor for {type(shape).__name__}")
    least, most = IMAGE_LIMITS
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor" if shape.is_qwen3 else "Qwen2_5_VLProcessor",
        "patch_size": shape.patch_size,
        "merge_size": shape.merge_size,
        "temporal_patch_size": shape.temporal_patch_size,
        "image_mean": list(shape.pixel_mean),
        "image_std": list(shape.pixel_std),
        "size": {"shortest_edge": min(least, 4 * shape.pixels_per_token**2), "longest_edge": most},
    }
