"""`Picture`: the pixels of an image as a vision tower reads them, and where its placeholder tokens are in a text.

The processor of a model (`models/vision`) resizes an image once, and replaces the one mark that a chat template writes for it by
the image's placeholder tokens. From there on an image is a span of tokens with a picture: in a request, in a token node, in a batch.
Engine, learner, journal and report read the same pixels. Nothing expands a placeholder a second time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from burnish.core.trajectory import TokenNode

PICTURE_STARTS, PICTURE_KEYS = "picture_starts", "picture_keys"
"""Ragged columns of a batch: the position in its sequence at which each picture begins, and the picture's key."""
PICTURE_COLUMNS = frozenset({PICTURE_STARTS, PICTURE_KEYS})
PICTURE_LABEL = "picture/"
"""Begins the labels of pixels among the arrays of a message or a file: `picture/<key>/<t>/<rows>/<columns>/<seconds per frame>`."""
NODE_SPANS = "node_pictures"
"""Array of a journal: (node, start, key) of every span."""


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
        content = np.ascontiguousarray(self.pixels).data
        digest = hashlib.blake2b(content, digest_size=8, key=hashlib.sha256(about).digest())
        return int.from_bytes(digest.digest(), "big") >> 1

    @cached_property
    def token_numbers(self) -> np.ndarray:
        """[num_tokens] int64: a negative number for each placeholder token, which no other picture has."""
        return -1 - (self.key ^ (np.arange(self.num_tokens) << 40))


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
    """Return tokens with a number of its own in place of every placeholder (`Picture.token_numbers`).

    Placeholders of all images are one token. A cache of prefixes compares these numbers instead, so that it never takes the
    keys and values of another image.
    """
    if not spans:
        return tokens
    found = list(tokens)
    for span in spans:
        found[span.start : span.end] = span.picture.token_numbers.tolist()
    return found


def check_spans(spans: Sequence[PictureSpan], num_tokens: int, what: str) -> None:
    """Raise if spans overlap, are out of order, or do not lie within the tokens of `what`."""
    at = 0
    for span in spans:
        if span.start < at or span.end > num_tokens:
            raise ValueError(
                f"{what}: a picture has the tokens {span.start} to {span.end}; expected them behind {at} and up to {num_tokens}"
            )
        at = span.end


# --- Pictures and spans as arrays, for messages, journal and checkpoints ----------------------------------------------------


def pictures_to_arrays(pictures: Iterable[Picture]) -> dict[str, np.ndarray]:
    """Return the pixels of pictures, each once, under labels that hold everything else."""
    found = {}
    for picture in pictures:
        seconds = "" if picture.seconds_per_frame is None else repr(picture.seconds_per_frame)
        found["/".join([f"{PICTURE_LABEL}{picture.key}", *map(str, picture.grid), seconds])] = picture.pixels
    return found


def pictures_from_arrays(arrays: Mapping[str, np.ndarray]) -> dict[int, Picture]:
    """Inverse of `pictures_to_arrays`, by key. Other arrays are ignored."""
    found = {}
    for label, pixels in arrays.items():
        if label.startswith(PICTURE_LABEL):
            key, frames, rows, columns, seconds = label.removeprefix(PICTURE_LABEL).split("/")
            picture = Picture(pixels, (int(frames), int(rows), int(columns)), float(seconds) if seconds else None)
            picture.__dict__["key"] = int(
                key
            )  # it was computed before; hashing all pixels again would take as long as reading them
            found[picture.key] = picture
    return found


def spans_to_arrays(nodes: Sequence[TokenNode]) -> dict[str, np.ndarray]:
    """Return the spans of some nodes, and each of their pictures once; {} if no node has one."""
    placed = [(index, span) for index, node in enumerate(nodes) for span in node.pictures]
    if not placed:
        return {}
    rows = [[index, span.start, span.picture.key] for index, span in placed]
    pictures = {span.picture.key: span.picture for _, span in placed}
    return {NODE_SPANS: np.array(rows, dtype=np.int64)} | pictures_to_arrays(pictures.values())


def restore_spans(nodes: Sequence[TokenNode], arrays: Mapping[str, np.ndarray]) -> None:
    """Write the spans of `spans_to_arrays` back. Journals without pictures have no such array."""
    if NODE_SPANS not in arrays:
        return
    pictures = pictures_from_arrays(arrays)
    for index, start, key in arrays[NODE_SPANS].tolist():
        nodes[index].pictures += (PictureSpan(start, pictures[key]),)
