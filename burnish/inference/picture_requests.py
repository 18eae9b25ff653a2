"""Requests with pictures on the native engines: what they must be, and the positions of their tokens."""

from __future__ import annotations

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Request
from burnish.models.decoder import Decoder
from burnish.models.vision.positions import rotation_delta


def check_pictures(request: Request, model: Decoder) -> None:
    """Raise if the pictures of a request are not exactly those that its placeholder tokens stand for."""
    shape = model.arch.vision
    if shape is None:
        if request.pictures:
            raise UserError(
                f"request {request.id}: it has {len(request.pictures)} pictures, and the model ({model.arch.family}) reads text only"
            )
        return
    tokens = np.asarray(request.tokens)
    is_placeholder = np.isin(tokens, list(shape.placeholder_tokens))
    is_pictured = np.zeros_like(is_placeholder)
    end = 0
    for number, span in enumerate(request.pictures, 1):
        where = f"request {request.id}: picture {number} at tokens {span.start} to {span.end - 1}"
        if span.start < end or span.end > len(tokens):
            raise UserError(f"{where} overlaps the one before it or exceeds the prompt of {len(tokens)} tokens")
        if not is_placeholder[span.start : span.end].all():
            raise UserError(f"{where}: some of these tokens are no placeholders of pictures")
        is_pictured[span.start : span.end] = True
        end = span.end
    if (without := np.flatnonzero(is_placeholder & ~is_pictured)).size:
        raise UserError(
            f"request {request.id}: token {without[0]} of the prompt is the placeholder {tokens[without[0]]} of a picture that the "
            "request does not have; text must not contain it"
        )


def rotation_delta_of(request: Request, model: Decoder) -> int:
    """Rotation position minus position of the tokens after the pictures of a request."""
    shape = model.arch.vision
    if shape is None or shape.rotation is None or not request.pictures:
        return 0
    return rotation_delta(request.pictures, shape.rotation)


def longest_position(request: Request, model: Decoder) -> int:
    """Positions that a request may need, in the cache and in the rotation table."""
    return len(request.tokens) + request.sampling.max_tokens + max(0, rotation_delta_of(request, model))


def drop_stale_features(model: Decoder) -> None:
    """Drop the cached features of pictures when an engine gets new weights, unless the tower is frozen.

    It is known to be frozen if the engine has the learner's own module, which trains other weights. A copy of the module trains
    none, and new weights may reach it in ways that no version counter sees.
    """
    if model.vision is None:
        return
    trains_decoder = any(parameter.requires_grad for parameter in model.parameters())
    trains_tower = any(parameter.requires_grad for parameter in model.vision.parameters())
    if trains_tower or not trains_decoder:
        model.drop_features()
