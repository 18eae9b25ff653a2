"""Rotation positions of texts with pictures: M-RoPE of Qwen2-VL (2409.12191), and its interleaved form of Qwen3-VL.

Text has the same position on all three axes. The tokens of a picture that begins at position p have p plus their frame, row and
column. Text goes on after the largest position so far. A rotation position is therefore not the index of a token in its sequence.
`transformers` 5 lets text go on after the rows and columns only, also if a video's time axis is longer. Qwen2.5-VL was trained with
the rule above, which vLLM and `transformers` 4 have too. For images and for Qwen3-VL, which splits a video into frames, both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from burnish.core.pictures import Picture, PictureSpan
from burnish.models.vision.axis_rotation import AxisRotation

AXES = 3


def rotation_positions(length: int, spans: Sequence[PictureSpan], rotation: AxisRotation) -> np.ndarray:
    """Positions [3, length] of a sequence of `length` tokens by axis: time, row, column.

    Spans that end after `length` are cut, so the positions of a prefix are a prefix of the positions.
    """
    found = np.empty((AXES, length), dtype=np.int64)
    before = position = 0
    for span in spans:
        if span.start >= length:
            break
        found[:, before : span.start] = position + np.arange(span.start - before)
        position += span.start - before
        of_picture = position + _picture_positions(span.picture, rotation)
        found[:, span.start : span.end] = of_picture[:, : length - span.start]
        before, position = span.end, int(of_picture.max()) + 1
    if before < length:
        found[:, before:] = position + np.arange(length - before)
    return found


def rotation_delta(spans: Sequence[PictureSpan], rotation: AxisRotation) -> int:
    """The rotation position minus the index, of every token after the last of the spans."""
    return sum(int(_picture_positions(span.picture, rotation).max()) + 1 - span.picture.num_tokens for span in spans)


def _picture_positions(picture: Picture, rotation: AxisRotation) -> np.ndarray:
    """[3, num_tokens] from the picture's first position on."""
    found = np.indices(picture.grid).reshape(AXES, -1)
    if picture.seconds_per_frame is not None and rotation.tokens_per_second is not None:
        # In float32, as transformers computes it: the product is rounded down.
        interval = np.float32(rotation.tokens_per_second * picture.seconds_per_frame)
        found[0] = (found[0].astype(np.float32) * interval).astype(np.int64)
    return found


def frequency_axes(rotation: AxisRotation) -> Tensor:
    """[head_dim / 2] the axis whose position turns each frequency."""
    sections = torch.tensor(rotation.sections)
    if not rotation.is_interleaved:
        return torch.repeat_interleave(torch.arange(AXES), sections)
    axes = torch.zeros(int(sections.sum()), dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * rotation.sections[axis] : AXES] = axis
    return axes


def rotation_rows(table: Tensor, positions: Tensor, rotation: AxisRotation) -> Tensor:
    """Rows [N, 1, head_dim] of a rotation table [P, 1, head_dim] for positions [3, N]; contiguous, as kernels read them."""
    axes, columns = _table_columns(rotation, table.device)
    # The result of an index has the strides of the index.
    return table[positions[axes].t().contiguous(), 0, columns][:, None]


@cache
def _table_columns(rotation: AxisRotation, device: torch.device) -> tuple[Tensor, Tensor]:
    """[head_dim] the axis of each column of a rotation table, and the columns."""
    axes = frequency_axes(rotation).repeat(2)
    return axes.to(device), torch.arange(axes.shape[0], device=device)
