"""The files of an image processor in a saved model: those of the model's directory, or new ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.models.vision.interfaces import VisionShape
from burnish.models.vision.qwen_processor import IMAGE_LIMITS
from burnish.models.vision.qwen_shape import QwenVisionShape
from burnish.models.vision.siglip_shape import SiglipShape
from burnish.run.checkpoint.snapshot import BytesFile

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def processor_contents(shape: VisionShape | None, source: Path | None) -> list[BytesFile]:
    """The files that say how a model's images are resized; none for a text model."""
    if shape is None:
        return []
    if source is not None:
        return kept_processor_files(source)
    return [BytesFile(PROCESSOR_FILES[0], json.dumps(new_processor_config(shape), indent=1))]


def kept_processor_files(source: Path) -> list[BytesFile]:
    """The files of a model directory that say how its images are resized."""
    return [BytesFile(name, (source / name).read_bytes()) for name in PROCESSOR_FILES if (source / name).is_file()]


def new_processor_config(shape: VisionShape) -> dict[str, Any]:
    """The preprocessor_config.json of a model that was created here."""
    if isinstance(shape, SiglipShape):
        return siglip_processor_config(shape)
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


def siglip_processor_config(shape: SiglipShape) -> dict[str, Any]:
    """The preprocessor_config.json of a new model with a SigLIP tower. An image is one picture, not cut into tiles."""
    side = shape.image_size
    common = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if shape.connector == "mean":
        names = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
        return {**names, **common, "size": {"height": side, "width": side}}
    names = {"image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor"}
    edge = {"longest_edge": side}
    return {**names, **common, "size": edge, "max_image_size": edge, "do_image_splitting": False}
