"""`piece_pass`: the pictures of one forward pass over pieces of sequences, prepared on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from burnish.core.pictures import Picture, PictureSpan
from burnish.models.kernels.device import to_device
from burnish.models.vision.interfaces import PicturePass, VisionShape
from burnish.models.vision.positions import AXES, rotation_positions


class Piece(NamedTuple):
    """Consecutive tokens of a sequence: those from `start` to before `stop`."""

    start: int
    stop: int
    spans: Sequence[PictureSpan]
    """All pictures of the sequence, also those before the piece: positions count from the first token."""


def piece_pass(pieces: Sequence[Piece], shape: VisionShape, device: torch.device) -> PicturePass | None:
    """The pictures of a pass whose rows are the tokens of the pieces, without features; None if no piece has pictures.

    A picture that several pieces show is computed once.
    """
    if not any(piece.spans for piece in pieces):
        return None
    pictures: dict[int, Picture] = {}
    first_feature: dict[int, int] = {}
    num_features, columns, rotations = 0, [], []
    for piece in pieces:
        index = np.full(piece.stop - piece.start, -1)
        for span in piece.spans:
            begin, end = max(span.start, piece.start), min(span.end, piece.stop)
            if begin >= end:
                continue
            key = span.picture.key
            if key not in pictures:
                pictures[key], first_feature[key] = span.picture, num_features
                num_features += span.picture.num_tokens
            index[begin - piece.start : end - piece.start] = first_feature[key] + np.arange(begin, end) - span.start
        columns.append(index)
        if shape.rotation is not None:
            rotations.append(rotation_positions(piece.stop, piece.spans, shape.rotation)[:, piece.start :])
    rotation = np.concatenate(rotations, 1) if rotations else np.empty((AXES, 0), dtype=np.int64)
    index = np.concatenate(columns)
    rows = np.flatnonzero(index >= 0)
    return PicturePass(
        to_device(index, device),
        to_device(rotation, device) if rotations else None,
        int(rotation.max(initial=-1)) + 1,
        pictures=tuple(pictures.values()),
        known_places=(to_device(rows, device), to_device(index[rows], device)),
    )
