"""Image processors of Idefics3, SmolVLM and Gemma 3: resizing, tiles, and the tokens around them.

Pixels and tokens equal those of the families' processors in transformers with its PIL backend. Idefics3 and SmolVLM cut an image into
square tiles and add the whole image at the size of one tile. Each tile is a picture. Gemma 3 resizes every image to one square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from burnish.config.errors import UserError
from burnish.core.pictures import Picture, PictureSpan
from burnish.models.vision.interfaces import Expansion, PixelLimits
from burnish.models.vision.resizing import Resample, resized
from burnish.models.vision.siglip_shape import SiglipShape

Encode = Callable[[str], list[int]]
"""Token ids of a text in which the names of control tokens stand for these tokens."""
NORMALISATION: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
"""What the tower does with pixels (`siglip.py`)."""
MAX_SIDE = 4096
"""Longest side of an image of Idefics3 before it is cut into tiles."""
MAX_TILES = 6
"""Rows and columns of tiles that have tokens, `<row_6_col_6>`."""
VIDEO_INTRODUCTION = "You are provided the following series of {} frames from a {} [H:MM:SS] video.\n"
FRAME_INTRODUCTION = "\nFrame from {:02d}:{:02d}:"
GEMMA_FRAME = "\n\n"
UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


class Idefics3Processor:
    """Idefics3 and SmolVLM. `<image>` is the mark of the chat template and the placeholder of a tile's tokens."""

    def __init__(
        self, config: Mapping[str, Any], shape: SiglipShape, encode: Encode, limits: PixelLimits, where: str
    ) -> None:
        self.shape, self.encode, self.limits, self.where = shape, encode, limits, where
        self.tile = int(_size(config, "max_image_size", {"longest_edge": shape.image_size})["longest_edge"])
        self.longest = int(_size(config, "size", {"longest_edge": 4 * self.tile})["longest_edge"])
        self.is_split = bool(config.get("do_image_splitting", True))
        self.resample: Resample = config.get("resample", Resample.LANCZOS)
        (self.image_mark,) = shape.placeholder_tokens
        video = encode("<video>")
        self.video_mark: int | None = video[0] if len(video) == 1 else None
        self.placeholder_tokens = shape.placeholder_tokens
        self.texts_around: Mapping[int, tuple[str, str]] = (
            {} if self.video_mark is None else {self.video_mark: ("", "\n\n")}
        )
        if self.tile != shape.image_size:
            raise UserError(
                f"{where}: max_image_size is {self.tile}, but the vision tower reads {shape.image_size} pixels; set it to "
                f"{{'longest_edge': {shape.image_size}}}"
            )
        check_normalisation(config, where)
        if limits != PixelLimits() and not self.is_split:
            raise UserError(
                f"model.image_pixels: {where} has do_image_splitting=false, so every image has {self.tile} x {self.tile} pixels; "
                "leave the key out"
            )
        if limits.most is not None and limits.most < self.tile**2:
            raise UserError(
                f"model.image_pixels: this model reads tiles of {self.tile} x {self.tile} pixels, so an image has at least "
                f"{self.tile**2} pixels; at most {limits.most} cannot be had"
            )
        self._start, self._global = encode("<fake_token_around_image>"), encode("<global-img>")

    def image(self, image: np.ndarray) -> Expansion:
        """Expand an image, uint8 [H, W, 3]: its tiles row by row, then all of it at the size of one tile."""
        height, width = self._fitted(*image.shape[:2])
        sized = resized(image, height, width, self.resample)
        if not self.is_split:
            return self._whole(resized(sized, self.tile, self.tile, self.resample))
        rows, columns = _tiles(height, width, self.tile)
        sized = resized(sized, rows * self.tile, columns * self.tile, self.resample)
        if rows == columns == 1:
            return self._whole(sized)
        tokens: list[int] = []
        pictures: list[PictureSpan] = []
        for row in range(rows):
            for column in range(columns):
                top, left = row * self.tile, column * self.tile
                tokens += [*self._start, *self.encode(f"<row_{row + 1}_col_{column + 1}>")]
                self._add(tokens, pictures, sized[top : top + self.tile, left : left + self.tile])
            tokens += self.encode("\n" if row + 1 < rows else "\n\n")
        whole = self._whole(resized(sized, self.tile, self.tile, self.resample))
        pictures += (PictureSpan(len(tokens) + span.start, span.picture) for span in whole.pictures)
        return Expansion(tokens + whole.tokens, tuple(pictures))

    def video(self, frames: Sequence[np.ndarray], frames_per_second: float) -> Expansion:
        """Expand the frames of a video, uint8 [H, W, 3] each: one tile with a time stamp before it for each frame."""
        if self.video_mark is None:
            raise UserError(f"{self.where}: this model has no <video> token: give the frames as images")
        seconds = [index / frames_per_second for index in range(len(frames))]
        duration = timedelta(seconds=int(len(frames) / frames_per_second))
        text = VIDEO_INTRODUCTION.format(number_words(len(frames)), duration)
        tokens: list[int] = []
        pictures: list[PictureSpan] = []
        for frame, second in zip(frames, seconds, strict=True):
            text += FRAME_INTRODUCTION.format(int(second // 60), int(second % 60))
            tokens, text = tokens + self.encode(text), ""
            height, width = self._longest_to(self.longest, *frame.shape[:2])
            sized = resized(resized(frame, height, width, self.resample), self.tile, self.tile, self.resample)
            whole = self._whole(sized)
            pictures += (PictureSpan(len(tokens) + span.start, span.picture) for span in whole.pictures)
            tokens += whole.tokens
        return Expansion(tokens, tuple(pictures))

    def _whole(self, tile: np.ndarray) -> Expansion:
        tokens, pictures = [*self._start, *self._global], list[PictureSpan]()
        self._add(tokens, pictures, tile)
        return Expansion(tokens + self._start, tuple(pictures))

    def _add(self, tokens: list[int], pictures: list[PictureSpan], tile: np.ndarray) -> None:
        side = self.shape.tokens_per_side
        picture = Picture(np.ascontiguousarray(tile)[None], (1, side, side))
        pictures.append(PictureSpan(len(tokens), picture))
        tokens += [self.image_mark] * picture.num_tokens

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image before it is cut: its longest side, lowered or raised by whole tiles for the limits."""
        longest = self.longest
        least, most = self.limits.least or 0, self.limits.most or math.inf

        def pixels() -> int:
            return math.prod(_tiles(*self._longest_to(longest, height, width), self.tile)) * self.tile**2

        while pixels() > most and longest > self.tile:
            longest = self.tile * (math.ceil(longest / self.tile) - 1)
        while pixels() < least and longest < min(MAX_TILES * self.tile, MAX_SIDE):
            longest = self.tile * (longest // self.tile + 1)
        return self._longest_to(longest, height, width)

    @staticmethod
    def _longest_to(longest: int, height: int, width: int) -> tuple[int, int]:
        """The size of an image with its longest side as given and the other one even."""
        ratio = width / height
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        if max(height, width) > MAX_SIDE:
            ratio = width / height
            height, width = (int(MAX_SIDE / ratio), MAX_SIDE) if width >= height else (MAX_SIDE, int(MAX_SIDE * ratio))
        return max(height, 1), max(width, 1)


class Gemma3Processor:
    """Gemma 3. The mark of the chat template is the token that begins an image; blank lines stand around the image."""

    def __init__(self, config: Mapping[str, Any], shape: SiglipShape, limits: PixelLimits, where: str) -> None:
        assert shape.image_marks is not None, "Gemma 3 has tokens around an image"
        self.shape, self.where = shape, where
        self.image_mark, self.end = shape.image_marks
        self.video_mark: int | None = None
        (self.placeholder,) = self.placeholder_tokens = shape.placeholder_tokens
        self.texts_around: Mapping[int, tuple[str, str]] = {self.image_mark: (GEMMA_FRAME, GEMMA_FRAME)}
        self.resample: Resample = config.get("resample", Resample.BILINEAR)
        size, side = _size(config, "size", {"height": shape.image_size, "width": shape.image_size}), shape.image_size
        if (size.get("height"), size.get("width")) != (side, side):
            raise UserError(f"{where}: size is {size}, but the vision tower reads {side} x {side} pixels")
        if config.get("do_pan_and_scan"):
            raise UserError(f"{where}: do_pan_and_scan is not supported; set it to false")
        check_normalisation(config, where)
        if limits != PixelLimits():
            raise UserError(
                f"model.image_pixels: Gemma 3 reads every image at {side} x {side} = {side**2} pixels; leave the key out"
            )

    def image(self, image: np.ndarray) -> Expansion:
        """Expand an image, uint8 [H, W, 3]."""
        side, tokens = self.shape.image_size, self.shape.tokens_per_side
        picture = Picture(resized(image, side, side, self.resample)[None], (1, tokens, tokens))
        filled = [self.image_mark, *[self.placeholder] * picture.num_tokens, self.end]
        return Expansion(filled, (PictureSpan(1, picture),))

    def video(self, frames: Sequence[np.ndarray], frames_per_second: float) -> Expansion:
        """Gemma 3 has no token for a video."""
        raise UserError(f"{self.where}: Gemma 3 reads no videos: give the frames as images")


def check_normalisation(config: Mapping[str, Any], where: str) -> None:
    """Raise unless a preprocessor_config.json normalises pixels as the tower does."""
    for key, expected in NORMALISATION.items():
        if not np.allclose(config.get(key, expected), expected):
            raise UserError(f"{where}: {key} is {config[key]}, but SigLIP towers have {expected}")
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if not config.get(key, True):
            raise UserError(f"{where}: {key} is false, which is not supported; set it to true")


def number_words(number: int) -> str:
    """A number below a million in English words, as SmolVLM was trained with (the package num2words)."""
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens = TENS[number // 10 - 2]
        return tens if number % 10 == 0 else f"{tens}-{UNITS[number % 10]}"
    size, name, joint = (100, "hundred", " and ") if number < 1000 else (1000, "thousand", ", ")
    rest = number % size
    head = f"{number_words(number // size)} {name}"
    if not rest:
        return head
    return f"{head}{' and ' if rest < 100 else joint}{number_words(rest)}"


def _tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Rows and columns of tiles that an image is enlarged to; the longer side decides first."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / ratio) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * ratio) / tile)


def _size(config: Mapping[str, Any], key: str, default: dict[str, int]) -> dict[str, int]:
    """A size of a preprocessor_config.json."""
    found = config.get(key) or default
    return {key: value for key, value in dict(found).items() if value is not None}
