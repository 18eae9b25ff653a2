"""Whether a vision tower is trained, and passes that must reach it without a picture."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from burnish.config.model import Vision
from burnish.core.pictures import Picture
from burnish.models.decoder import Decoder
from burnish.models.vision.interfaces import PicturePass
from burnish.models.vision.positions import AXES


def is_tower_trained(model: Decoder) -> bool:
    """Whether a pass with gradient reaches parameters of the tower."""
    return model.vision is not None and any(parameter.requires_grad for parameter in model.vision.parameters())


def trained_part(model: Decoder) -> Vision:
    """What of a decoder's vision tower is trained."""
    if model.vision is None or not is_tower_trained(model):
        return "frozen"
    num_trained = sum(parameter.numel() for parameter in model.vision.parameters() if parameter.requires_grad)
    of_projector = sum(parameter.numel() for parameter in model.vision.projector.parameters())
    return "projector" if num_trained <= of_projector else "trained"


def blank_pass(model: Decoder, offsets: Tensor) -> PicturePass:
    """A pass over text that computes a blank picture and uses none of it, so that the tower's gradient is 0 and not missing.

    Ranks that shard a trained tower reduce its gradients together, also if one of them has no picture in a micro-batch.
    """
    shape = model.arch.vision
    assert shape is not None, "a model with a vision tower"
    lengths = offsets.diff()
    positions = torch.arange(int(offsets[-1]), device=offsets.device)
    index = torch.full_like(positions, -1)
    side, grid = shape.smallest_picture
    blank = Picture(np.zeros((1, side, side, 3), dtype=np.uint8), grid)
    if shape.rotation is None:
        return PicturePass(index, pictures=(blank,))
    positions = positions - torch.repeat_interleave(offsets[:-1], lengths)
    rotation = positions.expand(AXES, -1)
    return PicturePass(index, rotation, int(lengths.max()), pictures=(blank,))
