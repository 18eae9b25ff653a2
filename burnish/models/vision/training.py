"""What of a vision tower is trained, and passes that must reach the tower without a picture."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.models.decoder import Decoder
from burnish.models.vision.interfaces import PicturePass
from burnish.models.vision.positions import AXES

VisionTraining = Literal["frozen", "projector", "trained"]
"""`frozen` trains nothing of the tower, `projector` only what is between its encoder and the decoder, `trained` all of it."""


def train_vision(model: Decoder, how: VisionTraining) -> None:
    """Choose the trained parameters of a decoder's vision tower. Call it after adapters were added, which freeze everything."""
    if model.vision is None:
        raise UserError(f"model.vision={how}: a {model.arch.family} model has no vision tower; remove the key")
    model.vision.requires_grad_(how == "trained")
    if how == "projector":
        model.vision.projector.requires_grad_(True)


def is_tower_trained(model: Decoder) -> bool:
    """Whether a pass with gradient reaches parameters of the tower."""
    return model.vision is not None and any(parameter.requires_grad for parameter in model.vision.parameters())


def blank_pass(model: Decoder, offsets: Tensor) -> PicturePass:
    """A pass over text that computes a blank picture and uses none of it, so that the tower's gradient is 0 and not missing.

    Ranks that shard a trained tower reduce its gradients together, also if one of them has no picture in a micro-batch.
    """
    shape = model.arch.vision
    assert shape is not None, "a model with a vision tower"
    lengths = offsets.diff()
    positions = torch.arange(int(offsets[-1]), device=offsets.device)
    index = torch.full_like(positions, -1)
    if shape.rotation is None:
        return PicturePass(index, pictures=(shape.blank_picture(),))
    positions = positions - torch.repeat_interleave(offsets[:-1], lengths)
    rotation = positions.expand(AXES, -1)
    return PicturePass(index, rotation, int(lengths.max()), pictures=(shape.blank_picture(),))
