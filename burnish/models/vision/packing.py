"""`picture_pass`: the pictures of packed sequences as a pass of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from burnish.core.pictures import Picture, PictureSpan
from burnish.models.vision.interfaces import ImageFeatures, PicturePass, VisionShape
from burnish.models.vision.positions import AXES, rotation_positions


def picture_pass(
    offsets: Tensor,
    spans: Sequence[Sequence[PictureSpan]],
    shape: VisionShape,
    features: ImageFeatures | None = None,
) -> PicturePass | None:
    """The pass over all tokens of packed sequences, each with its spans; None if there are no pictures.

    A picture that occurs several times is computed once. `features` are those of `distinct_pictures`.
    """
    if not any(spans):
        return None
    starts = offsets.tolist()
    pictures = distinct_pictures(spans)
    ends = accumulate(picture.num_tokens for picture in pictures)
    first = {picture.key: end - picture.num_tokens for picture, end in zip(pictures, ends, strict=True)}
    index = np.full(starts[-1], -1, dtype=np.int64)
    rotation = None if shape.rotation is None else np.empty((AXES, starts[-1]), dtype=np.int64)
    for start, end, of_sequence in zip(starts[:-1], starts[1:], spans, strict=True):
        for span in of_sequence:
            begin, count = start + span.start, span.picture.num_tokens
            if start + span.end > end:
                raise ValueError(
                    f"a picture's {count} tokens from {span.start} do not fit a sequence of {end - start} tokens"
                )
            index[begin : begin + count] = first[span.picture.key] + np.arange(count)
        if rotation is not None and shape.rotation is not None:
            rotation[:, start:end] = rotation_positions(end - start, of_sequence, shape.rotation)
    device = offsets.device
    return PicturePass(
        torch.from_numpy(index).to(device),
        None if rotation is None else torch.from_numpy(rotation).to(device),
        0 if rotation is None else int(rotation.max()) + 1,
        features,
        pictures,
    )


def distinct_pictures(spans: Sequence[Sequence[PictureSpan]]) -> tuple[Picture, ...]:
    """The pictures of sequences, each once, in the order of their first place."""
    return tuple({span.picture.key: span.picture for of_sequence in spans for span in of_sequence}.values())
