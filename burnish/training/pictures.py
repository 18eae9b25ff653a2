"""The pictures of a micro-batch in the learner's passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.sharded_tensors import is_dtensor
from burnish.models.decoder import Decoder
from burnish.models.heads import ScoreModel, ValueModel
from burnish.models.transformers_model import TransformersBackbone, TransformersPolicy
from burnish.models.vision.pieces import Piece, piece_pass
from burnish.models.vision.training import blank_pass, is_tower_trained


def reading_pictures(model: nn.Module, batch: Batch) -> AbstractContextManager[object]:
    """A context in which passes of the model over a batch read the batch's pictures."""
    spans = batch.picture_spans()
    if not any(spans):
        return _without_pictures(model, batch)
    backbone = model.backbone if isinstance(model, ValueModel | ScoreModel) else model
    if isinstance(backbone, TransformersPolicy | TransformersBackbone):
        return backbone.with_pictures([[span.picture for span in own] for own in spans])
    assert isinstance(backbone, Decoder), "a policy or what was made of one"
    shape = backbone.arch.vision
    if shape is None:
        raise UserError(
            f"a batch has images, and a {backbone.arch.family} model reads text only: train a model with a vision tower, "
            "and give critics, teachers and reward models one as well"
        )
    pieces = [Piece(0, length, own) for length, own in zip(batch.lengths.tolist(), spans, strict=True)]
    return backbone.with_pictures(piece_pass(pieces, shape, batch.tokens.device))


def _without_pictures(model: nn.Module, batch: Batch) -> AbstractContextManager[object]:
    backbone = model.backbone if isinstance(model, ValueModel | ScoreModel) else model
    if not isinstance(backbone, Decoder) or not torch.is_grad_enabled() or not is_tower_trained(backbone):
        return nullcontext()
    return backbone.with_pictures(blank_pass(backbone, batch.offsets)) if _is_sharded(backbone) else nullcontext()


def _is_sharded(model: Decoder) -> bool:
    assert model.vision is not None, "a model with a vision tower"
    return any(is_dtensor(parameter) for parameter in model.vision.parameters())
