"""Images of any image-text model through the processor of transformers: for models that run through transformers (slower).

An image stays a picture of its own size. `TransformersProcessor` asks the model's processor which tokens stand for it. A forward pass
asks the same processor for the model's inputs (`PixelInputs`), with the names and shapes that this model reads. Both are deterministic,
so engine and learner see the same numbers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.pictures import Picture, PictureSpan
from burnish.models.vision.interfaces import Expansion, PixelLimits
from burnish.models.vision.resizing import Resample, resized

TEXT_INPUTS = ("input_ids", "attention_mask")
TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids")
"""Inputs that say which tokens are of an image."""
TILED_TYPES = ("idefics3", "smolvlm")
"""Models whose pictures are tiles, cut by `siglip_processors.py`. Their processor must not cut them again."""
TILE_OPTIONS = {"do_resize": False, "do_image_splitting": False}
MAX_CACHED = 64
"""Inputs of prompts that are kept: the samples of a group have the same images."""

Inputs = dict[str, Tensor]
Signature = tuple[tuple[str, tuple[int, ...]], ...]


def load_pretrained_processor(directory: Path) -> Any:
    """The processor of transformers of a directory; no code of it is run and nothing is downloaded."""
    from transformers import AutoProcessor  # type: ignore[attr-defined]  # mypy leaves out transformers.models

    try:
        processor: Any = AutoProcessor.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise UserError(f"transformers cannot load the image processor of {directory}: {error}") from error
    if getattr(processor, "image_processor", None) is None:
        raise UserError(f"{directory} has no image processor: copy preprocessor_config.json from the published model")
    return processor


class TransformersProcessor:
    """The tokens of images by the processor of transformers. A video is given as images."""

    def __init__(self, processor: Any, config: Mapping[str, Any], limits: PixelLimits, where: str) -> None:
        self.processor, self.limits, self.where = processor, limits, where
        placeholder = config.get("image_token_id", config.get("image_token_index"))
        if not isinstance(placeholder, int):
            raise UserError(f"{where}: config.json has no image_token_id, so it is not known which tokens are an image")
        self.placeholder_tokens = frozenset({placeholder})
        self.video_mark: int | None = None
        self.texts_around: Mapping[int, tuple[str, str]] = {}
        name = getattr(processor, "image_token", None)
        marks = [] if name is None else processor.tokenizer.encode(name, add_special_tokens=False)
        if len(marks) != 1:
            raise UserError(f"{where}: its processor has no single token for an image (image_token is {name!r})")
        self.image_token, self.image_mark = str(name), int(marks[0])

    def image(self, image: np.ndarray) -> Expansion:
        """Expand an image, uint8 [H, W, 3]. Its span has all tokens from the first placeholder to the last."""
        image = self._within_limits(image)
        found = self.processor(text=[self.image_token], images=[image], add_special_tokens=False)
        tokens = [int(token) for token in found["input_ids"][0]]
        places = [index for index, token in enumerate(tokens) if token in self.placeholder_tokens]
        if not places:
            raise UserError(f"{self.where}: its processor wrote no token for an image")
        picture = Picture(np.ascontiguousarray(image)[None], (1, 1, places[-1] + 1 - places[0]))
        return Expansion(tokens, (PictureSpan(places[0], picture),))

    def video(self, frames: Sequence[np.ndarray], frames_per_second: float) -> Expansion:
        """Videos are not read through transformers."""
        raise UserError(f"{self.where}: videos need a native vision tower: give the frames as images")

    def _within_limits(self, image: np.ndarray) -> np.ndarray:
        """The image with its number of pixels within the limits and its sides in proportion."""
        height, width = image.shape[:2]
        wanted = min(max(height * width, self.limits.least or 0), self.limits.most or math.inf)
        if wanted == height * width:
            return image
        factor = math.sqrt(wanted / (height * width))
        rounded = math.floor if factor < 1 else math.ceil
        return resized(image, max(1, rounded(height * factor)), max(1, rounded(width * factor)), Resample.BICUBIC)


class PixelInputs:
    """The inputs of a transformers model for the pictures of sequences. The processor of its directory is loaded at the first picture."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self.directory = directory
        tokens = [config.get(key) for key in ("image_token_id", "image_token_index", "video_token_id")]
        self.placeholder_tokens = frozenset(token for token in tokens if isinstance(token, int))
        self.options: dict[str, Any] = TILE_OPTIONS if config["model_type"] in TILED_TYPES else {}
        self._cached: OrderedDict[tuple[int, ...], Inputs] = OrderedDict()

    @cached_property
    def processor(self) -> Any:
        return load_pretrained_processor(self.directory)

    def of(self, pictures: Sequence[Picture]) -> Inputs:
        """The inputs of one sequence, on the host; {} without pictures."""
        if not pictures:
            return {}
        keys = tuple(picture.key for picture in pictures)
        if keys not in self._cached:
            self._cached[keys] = self._computed(pictures)
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        self._cached.move_to_end(keys)
        return self._cached[keys]

    def _computed(self, pictures: Sequence[Picture]) -> Inputs:
        if any(picture.is_video or picture.pixels.shape[0] != 1 for picture in pictures):
            raise UserError("a model that runs through transformers reads no videos: give their frames as images")
        text = self.processor.image_token * len(pictures)
        images = [picture.pixels[0] for picture in pictures]
        found = self.processor(text=[text], images=images, return_tensors="pt", **self.options)
        return {name: value for name, value in found.items() if name not in TEXT_INPUTS}

    def signature(self, pictures: Sequence[Picture]) -> Signature:
        """Sequences with equal signatures can be one batch: their inputs have equal names, and shapes but for the first dimension."""
        inputs = self.of(pictures)
        return tuple((name, tuple(inputs[name].shape[1:])) for name in sorted(inputs) if name not in TYPE_INPUTS)

    def joined(self, sequences: Sequence[Sequence[Picture]], tokens: Tensor, dtype: torch.dtype) -> Inputs:
        """The inputs of a batch of sequences with equal signatures, whose padded tokens are [b, L], on the device of the tokens.

        Pixels have the model's `dtype`, which not every model of transformers turns them into.
        """
        each = [self.of(pictures) for pictures in sequences]
        found = {}
        for name in each[0]:
            if name in TYPE_INPUTS:
                wanted = torch.tensor(sorted(self.placeholder_tokens), device=tokens.device)
                found[name] = torch.isin(tokens, wanted).long()
            else:
                whole = torch.cat([inputs[name] for inputs in each])
                found[name] = whole.to(tokens.device, dtype if whole.is_floating_point() else None)
        return found
