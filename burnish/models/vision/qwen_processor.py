"""The image processor of Qwen2.5-VL and Qwen3-VL: resizing within limits of pixels, placeholders, and time stamps of videos.

Image pixels and tokens equal those of transformers' processors with its PIL backend. Frames of a video are resized by pillow too, where
transformers resizes them with torchvision. They are not sampled: the data says which frames a video has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from burnish.config.errors import UserError
from burnish.core.pictures import Picture, PictureSpan
from burnish.models.vision.interfaces import Expansion, PixelLimits
from burnish.models.vision.qwen_shape import QwenVisionShape
from burnish.models.vision.resizing import Resample, resized

Encode = Callable[[str], list[int]]
"""Token ids of a text."""
MAX_ASPECT_RATIO = 200
IMAGE_LIMITS = (56 * 56, 28 * 28 * 1280)
QWEN25_VIDEO_LIMITS = (128 * 28 * 28, 28 * 28 * 768)
"""Pixels of one frame."""
QWEN3_VIDEO_LIMITS = (128 * 32 * 32, 32 * 32 * 768)
"""Pixels of all frames. transformers has these defaults if a file does not say otherwise."""


class QwenProcessor:
    """Qwen2.5-VL and Qwen3-VL. The mark of the chat template is the placeholder itself."""

    def __init__(
        self,
        config: Mapping[str, Any],
        videos: Mapping[str, Any],
        shape: QwenVisionShape,
        encode: Encode,
        limits: PixelLimits,
        where: str,
    ) -> None:
        self.shape, self.encode = shape, encode
        self.image_mark = shape.image_token
        self.video_mark: int | None = shape.video_token
        self.placeholder_tokens = shape.placeholder_tokens
        self.texts_around: Mapping[int, tuple[str, str]] = {}
        self.resample = Resample(config.get("resample", Resample.BICUBIC))
        self.image_limits = _limited(_limits_of(config, IMAGE_LIMITS), limits)
        default = QWEN3_VIDEO_LIMITS if shape.is_qwen3 else QWEN25_VIDEO_LIMITS
        self.video_limits = _limits_of(videos, default)
        if not shape.is_qwen3:
            self.video_limits = _limited(self.video_limits, limits)
        _check(config, shape, where)

    def image(self, image: np.ndarray) -> Expansion:
        """Expand an image, uint8 [H, W, 3]."""
        height, width = image.shape[:2]
        height, width = fitted_size(height, width, self.shape.pixels_per_token, *self.image_limits)
        picture = self._picture([image], height, width, None)
        return Expansion([self.image_mark] * picture.num_tokens, (PictureSpan(0, picture),))

    def video(self, frames: Sequence[np.ndarray], frames_per_second: float) -> Expansion:
        """Expand the frames of a video, uint8 [H, W, 3] each; Qwen3-VL writes the time before every two frames."""
        depth = self.shape.temporal_patch_size
        if not frames or frames_per_second <= 0:
            raise UserError(f"a video has {len(frames)} frames at {frames_per_second} frames a second; expected some")
        height, width = frames[0].shape[:2]
        seconds = depth / frames_per_second
        if not self.shape.is_qwen3:
            size = fitted_size(height, width, self.shape.pixels_per_token, *self.video_limits)
            picture = self._picture(frames, *size, seconds)
            return Expansion([self.shape.video_token] * picture.num_tokens, (PictureSpan(0, picture),))
        size = fitted_video_size(len(frames), height, width, depth, self.shape.pixels_per_token, *self.video_limits)
        tokens: list[int] = []
        pictures = []
        for first in range(0, len(frames), depth):
            last = min(first + depth, len(frames)) - 1
            tokens += self.encode(f"<{(first + last) / 2 / frames_per_second:.1f} seconds>")
            picture = self._picture(frames[first : last + 1], *size, seconds)
            pictures.append(PictureSpan(len(tokens) + 1, picture))
            tokens += [self.shape.vision_start, *[self.shape.video_token] * picture.num_tokens, self.shape.vision_end]
        return Expansion(tokens, tuple(pictures))

    def _picture(self, frames: Sequence[np.ndarray], height: int, width: int, seconds: float | None) -> Picture:
        side = self.shape.pixels_per_token
        pixels = np.stack([resized(frame, height, width, self.resample) for frame in frames])
        grid = (-(-len(frames) // self.shape.temporal_patch_size), height // side, width // side)
        return Picture(pixels, grid, seconds)


def fitted_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """The size nearest to an image's, in multiples of `factor`, with at least and at most these pixels and about its shape."""
    _check_ratio(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def fitted_video_size(
    num_frames: int, height: int, width: int, depth: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """As `fitted_size`, with limits of the pixels of all frames (Qwen3-VL)."""
    if height < factor or width < factor:
        grow = max(factor / height, factor / width)
        height, width = int(height * grow), int(width * grow)
    _check_ratio(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    counted = max(round(num_frames / depth) * depth, depth)
    if counted * rows * columns > most:
        shrink = math.sqrt(num_frames * height * width / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted * rows * columns < least:
        grow = math.sqrt(least / (num_frames * height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def _check_ratio(height: int, width: int) -> None:
    if min(height, width) < 1 or max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise UserError(
            f"an image of {width} x {height} pixels has one side more than {MAX_ASPECT_RATIO} times as long as the other; cut it"
        )


def _limits_of(config: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    """Pixels at least and at most of a preprocessor_config.json; older files have them in keys of their own."""
    size = config.get("size") or {}
    least = config.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge") or default[0]
    most = config.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge") or default[1]
    return int(least), int(most)


def _limited(own: tuple[int, int], limits: PixelLimits) -> tuple[int, int]:
    """The user's limits, and the model's where the user gives none or where one contradicts the other."""
    least, most = own
    if limits.most is not None:
        least, most = min(least, limits.most), limits.most
    if limits.least is not None:
        least, most = limits.least, max(most, limits.least)
    return least, most


def _check(config: Mapping[str, Any], shape: QwenVisionShape, where: str) -> None:
    """Raise unless a preprocessor_config.json cuts and normalises pixels as the tower does."""
    expected: dict[str, Any] = {
        "image_mean": shape.pixel_mean,
        "image_std": shape.pixel_std,
        "rescale_factor": 1 / 255,
        "patch_size": shape.patch_size,
        "merge_size": shape.merge_size,
        "temporal_patch_size": shape.temporal_patch_size,
    }
    for key, value in expected.items():
        if config.get(key) is not None and not np.allclose(config[key], value):
            raise UserError(f"{where}: {key} is {config[key]}, but the vision tower has {value}")
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if not config.get(key, True):
            raise UserError(f"{where}: {key} is false, which is not supported; set it to true")
