"""What image processors, vision towers and the decoder say to each other.

An `ImageProcessor` resizes an image on the host and replaces the one mark of the chat template by placeholder tokens. A
`VisionTower` normalises the pixels on its device and computes one embedding for each placeholder token. A `PicturePass` puts these
embeddings into one forward pass of the decoder, with the positions that rotate queries and keys.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from burnish.core.pictures import Picture, PictureSpan
from burnish.models.vision.axis_rotation import AxisRotation


@dataclass(frozen=True)
class Expansion:
    """What replaces the one mark of a chat template for an image or a video."""

    tokens: list[int]
    pictures: tuple[PictureSpan, ...]
    """Their starts count from the first of `tokens`."""


class PixelLimits(NamedTuple):
    """Pixels of a resized image, at least and at most; None has the limit of the model's own processor."""

    least: int | None = None
    most: int | None = None


class ImageProcessor(Protocol):
    """Resizes images and writes their placeholder tokens, as the model's own processor in `transformers` does it."""

    image_mark: int
    """The token that the chat template writes for an image."""
    video_mark: int | None
    """The token that the chat template writes for a video; None if the model reads no videos."""
    placeholder_tokens: frozenset[int]
    """All tokens that stand for pixels; they can never be sampled."""
    texts_around: Mapping[int, tuple[str, str]]
    """Texts before and after a mark, by its token. They are put into the rendered text, because a tokenizer may join them with it."""

    def image(self, image: np.ndarray) -> Expansion:
        """Expand an image, uint8 [H, W, 3]."""

    def video(self, frames: Sequence[np.ndarray], frames_per_second: float) -> Expansion:
        """Expand the frames of a video, uint8 [H, W, 3] each."""


class VisionShape(Hashable, Protocol):
    """The hyper-parameters of a tower, `Architecture.vision`: a frozen dataclass of its family. `towers.py` builds the tower."""

    @property
    def placeholder_tokens(self) -> frozenset[int]:
        """All tokens that stand for pixels."""

    @property
    def rotation(self) -> AxisRotation | None:
        """How the decoder rotates tokens of pictures; None if by their index, as text."""

    @property
    def attends_both_ways(self) -> bool:
        """Whether the tokens of a picture attend to each other in both directions within the decoder (Gemma 3)."""

    @property
    def num_parameters(self) -> int:
        """Parameters of tower and projector."""

    @property
    def num_projector_parameters(self) -> int:
        """Parameters of the projector alone."""

    @property
    def num_deep_layers(self) -> int:
        """Decoder layers that deep-stack features are added after; 0 without them."""

    @property
    def smallest_picture(self) -> tuple[int, tuple[int, int, int]]:
        """Pixels of a side and grid of the smallest square picture that the tower can read."""

    def tower_flops(self, grids: Sequence[tuple[int, int, int]]) -> float:
        """Floating-point operations of a forward pass over pictures with these grids of placeholder tokens."""

    def saved_bytes(self, num_tokens: int, element: int, recomputes: bool) -> int:
        """Bytes that a trained tower saves for the backward pass, for pictures of `num_tokens` in numbers of `element` bytes."""


class ImageFeatures(NamedTuple):
    """What a tower computes for pictures, in their order."""

    embeddings: Tensor
    """[sum of num_tokens, hidden size of the decoder]"""
    deep: tuple[Tensor, ...] = ()
    """Deep-stack (2406.04334): added at the placeholders after decoder layer 0, 1, ...; each shaped as `embeddings`."""


class VisionTower(nn.Module):
    """A vision encoder with its projector: `Decoder.vision`, None for text models.

    The features of a picture do not depend on the other pictures of a call, except for rounding.
    """

    checkpoint: Callable[..., Tensor] | None = None
    """(forward of a block, its input, other arguments) -> its output, saving little for the backward pass; None saves everything."""

    def run_block(self, block: nn.Module, x: Tensor, *others: Any) -> Tensor:
        """The output of a block, under the activation policy if it gets a gradient (`activation_checkpointing.py`)."""
        if self.checkpoint is None or not torch.is_grad_enabled():
            return cast(Tensor, block(x, *others))
        return self.checkpoint(block, x, *others)

    @abstractmethod
    def forward(self, pictures: Sequence[Picture]) -> ImageFeatures:
        """Compute the features of pictures, on the device and in the dtype of the weights."""

    @property
    @abstractmethod
    def projector(self) -> nn.ModuleList:
        """The modules between the encoder and the decoder."""


@dataclass(frozen=True)
class PicturePass:
    """The pictures of one forward pass of the decoder; `Decoder.with_pictures` sets it.

    Rows are those of the pass: the tokens that it computes, which may be fewer than a packing has.
    """

    index: Tensor
    """[rows] the index of each row in the features; -1 for text."""
    rotation: Tensor | None = None
    """[3, rows] rotation positions by axis; None if the model rotates by the index of a token."""
    num_positions: int = 0
    """Above all rotation positions; 0 without them."""
    features: ImageFeatures | None = None
    """What the tower computed before, such as a cache's; None computes `pictures` within the pass, with gradient."""
    pictures: tuple[Picture, ...] = ()
    """The pictures of the features, each once."""
    known_places: tuple[Tensor, Tensor] | None = None
    """`places`, if the host knows them: to find them it would wait for the GPU."""

    def select(self, choose: Callable[[Tensor], Tensor]) -> PicturePass:
        """The pass over some of the rows; `choose` selects them of a column and may add rows of zeros, which are text."""
        rotation = None if self.rotation is None else choose(self.rotation.t().contiguous()).t()
        return replace(self, index=choose(self.index + 1) - 1, rotation=rotation, known_places=None)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Rows that are placeholders, and the index in the features of each."""
        if self.known_places is not None:
            return self.known_places
        rows = (self.index >= 0).nonzero().squeeze(1)
        return rows, self.index[rows]


def tower_features(tower: VisionTower, pictures: Sequence[Picture], one_by_one: bool = False) -> ImageFeatures:
    """The features of pictures. Computed `one_by_one` they do not depend on the others by a single bit (exact mode)."""
    if not one_by_one or len(pictures) == 1:
        features: ImageFeatures = tower(pictures)
        return features
    return join_features([tower([picture]) for picture in pictures])


def join_features(parts: Sequence[ImageFeatures]) -> ImageFeatures:
    """The features of pictures that were computed in parts."""
    deep = tuple(torch.cat(layer) for layer in zip(*(part.deep for part in parts), strict=True))
    return ImageFeatures(torch.cat([part.embeddings for part in parts]), deep)
