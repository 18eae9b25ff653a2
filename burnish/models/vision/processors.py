"""`load_processor`: the image processor of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.yaml_text import read_json_object
from burnish.models.vision.interfaces import ImageProcessor, PixelLimits
from burnish.models.vision.qwen_processor import QwenProcessor
from burnish.models.vision.qwen_shape import qwen3_vision, qwen25_vision
from burnish.models.vision.siglip_processors import Gemma3Processor, Idefics3Processor
from burnish.models.vision.siglip_shape import gemma3_shape, idefics3_shape
from burnish.models.vision.transformers_processor import TransformersProcessor, load_pretrained_processor

MODEL_LIMITS = PixelLimits()
CONFIG_FILE = "preprocessor_config.json"


def load_processor(directory: Path, limits: PixelLimits = MODEL_LIMITS) -> ImageProcessor | None:
    """The processor of a directory's model; None for a text model."""
    model = read_json_object(directory / "config.json") if (directory / "config.json").is_file() else {}
    if not model.get("vision_config"):
        return None
    config, where = preprocessor_config(directory)
    if model.get("model_type") in ("qwen2_5_vl", "qwen3_vl"):
        read = qwen25_vision if model["model_type"] == "qwen2_5_vl" else qwen3_vision
        return QwenProcessor(config, video_config(directory), read(model)["vision"], _encoder(directory), limits, where)
    if model.get("model_type") in ("idefics3", "smolvlm"):
        return Idefics3Processor(config, idefics3_shape(model), _encoder(directory), limits, where)
    if model.get("model_type") == "gemma3":
        return Gemma3Processor(config, gemma3_shape(model), limits, where)
    return TransformersProcessor(load_pretrained_processor(directory), model, limits, str(directory))


def preprocessor_config(directory: Path) -> tuple[dict[str, Any], str]:
    """How a directory's images are resized, and the file that says it. transformers 5 has it in processor_config.json."""
    path = directory / CONFIG_FILE
    if path.is_file():
        return read_json_object(path), str(path)
    path = directory / "processor_config.json"
    nested = read_json_object(path).get("image_processor") if path.is_file() else None
    if not isinstance(nested, dict):
        raise UserError(
            f"{directory}: config.json has a vision_config, but there is no {CONFIG_FILE} that says how images are resized; copy it from "
            "the published model"
        )
    return nested, f"{path} (image_processor)"


def video_config(directory: Path) -> dict[str, Any]:
    """How a directory's videos are resized; {} if no file says it."""
    path = directory / "video_preprocessor_config.json"
    if path.is_file():
        return read_json_object(path)
    path = directory / "processor_config.json"
    nested = read_json_object(path).get("video_processor") if path.is_file() else None
    return nested if isinstance(nested, dict) else {}


def _encoder(directory: Path) -> Any:
    """Token ids of a text by the tokenizer.json of a directory; names of control tokens stand for these."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{directory}: the tokens around the tiles of an image need a tokenizer.json")
    backend = Tokenizer.from_file(str(path))
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
