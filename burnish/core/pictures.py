"""`Picture`: the pixels of an image as a vision tower reads them, and where its placeholder tokens are in a text.

The processor of a model (`models/vision`) resizes an image once, and replaces the one mark that a chat template writes for it by
the image's placeholder tokens. From there on an image is a span of tokens with a picture: in a request, in a token node, in a batch.
Engine, learner, journal and report read the same pixels. Nothing expands a placeholder a second time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, a tile of one, or frames of a video: resized and in whole patches, not yet normalised."""

    pixels: np.ndarray  # uint8 [frames, height, width, 3]
    grid: tuple[int, int, int]
    """Frames, rows and columns of its placeholder tokens."""
    seconds_per_frame: float | None = None
    """Only of a video: seconds between two frames of `grid`."""

    def __post_init__(self) -> None:
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 4 or self.pixels.shape[3] != 3:
            raise ValueError(
                f"pixels should be uint8 [frames, height, width, 3], got {self.pixels.dtype} {self.pixels.shape}"
            )

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def is_video(self) -> bool:
        return self.seconds_per_frame is not None

    @cached_property
    def key(self) -> int:
        """The content's hash, which fits an int64 column. Equal pictures have equal keys in every process."""
        about = repr((self.pixels.shape, self.grid, self.seconds_per_frame)).encode()
        digest = hashlib.blake2b(self.pixels.tobytes(), digest_size=8, key=hashlib.sha256(about).digest())
        return int.from_bytes(digest.digest(), "big") >> 1


class PictureSpan(NamedTuple):
    """A picture and the place of its placeholder tokens, which are consecutive."""

    start: int
    """Index of its first token in the tokens that the span belongs to."""
    picture: Picture

    @property
    def end(self) -> int:
        return self.start + self.picture.num_tokens


def shifted(spans: Iterable[PictureSpan], by: int) -> tuple[PictureSpan, ...]:
    """Return spans of tokens that now begin `by` tokens later."""
    return tuple(PictureSpan(span.start + by, span.picture) for span in spans)


def distinct_tokens(tokens: Sequence[int], spans: Sequence[PictureSpan]) -> Sequence[int]:
    """Return tokens with a number of its own in place of every placeholder: negative, of the picture and the index in it.

    Placeholders of all images are one token. A cache of prefixes compares these numbers instead, so that it never takes the
    keys and values of another image.
    """
    if not spans:
        return tokens
    found = list(tokens)
    for span in spans:
        for index in range(span.picture.num_tokens):
            found[span.start + index] = -1 - (span.picture.key ^ (index << 40))
    return found
