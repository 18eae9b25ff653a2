"""Qwen2.5-VL and Qwen3-VL: towers, positions and whole models agree with transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.core.pictures import Picture, PictureSpan
from burnish.models.decoder import Decoder
from burnish.models.vision.interfaces import PicturePass
from burnish.models.vision.passes import Piece, picture_pass
from burnish.models.vision.qwen_tower import cut_patches
from burnish.models.weight_files import load_decoder
from tests.models.vision.conftest import TinyVision, random_picture

CPU = torch.device("cpu")
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
IMAGE, VIDEO = 50, 51
Row = tuple[list[int], tuple[PictureSpan, ...]]


def row(seed: int, *parts: int | Picture) -> Row:
    """Random text tokens in the given numbers, with the placeholders of pictures between them."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, Picture):
            spans.append(PictureSpan(len(tokens), part))
            tokens += [VIDEO if part.is_video else IMAGE] * part.num_tokens
        else:
            tokens += random.integers(2, 49, part).tolist()
    return tokens, tuple(spans)


def rows_of(family: str) -> list[Row]:
    """One image, several images with a second at the start, a video, and text only."""
    video = random_picture((2, 2, 3), 4, seconds=0.5, frames=3)
    if family == "qwen3_vl":
        video = random_picture((1, 2, 3), 4, seconds=0.5, frames=2)
    wide, tall = random_picture((1, 3, 5), 2), random_picture((1, 4, 2), 3)
    return [
        row(0, 5, random_picture((1, 4, 4), 1), 7),
        row(1, wide, 3, tall, 1, wide, 6),
        row(2, 4, video, 9),
        row(3, 8),
    ]


def pass_of(model: Decoder, rows: list[Row]) -> PicturePass | None:
    assert model.arch.vision is not None
    return picture_pass([Piece(0, len(tokens), spans) for tokens, spans in rows], model.arch.vision, CPU)


def their_logits(theirs: Any, ours: Decoder, tokens: list[int], spans: tuple[PictureSpan, ...]) -> Tensor:
    """transformers' logits [L, vocab] of one row, with its own positions."""
    shape, inputs = ours.arch.vision, dict[str, Any]()
    ids = torch.tensor([tokens])
    kinds = torch.zeros_like(ids)
    for name, mark, of_kind in (("image", IMAGE, False), ("video", VIDEO, True)):
        pictures = [span.picture for span in spans if span.picture.is_video == of_kind]
        kinds[ids == mark] = 1 + of_kind
        if pictures:
            values = cut_patches(pictures, shape, CPU).to(theirs.dtype)
            grids = [[p.grid[0], p.grid[1] * shape.merge_size, p.grid[2] * shape.merge_size] for p in pictures]
            inputs[f"{name}_grid_thw"] = torch.tensor(grids)
            inputs["pixel_values" if name == "image" else "pixel_values_videos"] = values
        if pictures and of_kind and theirs.config.model_type == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([p.seconds_per_frame for p in pictures])
    if spans:
        inputs["mm_token_type_ids"] = kinds.int()
    with torch.no_grad():
        return theirs(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_of_rows_with_pictures_are_those_of_transformers(tiny_vision: TinyVision, family: str) -> None:
    theirs, directory = tiny_vision(family)
    ours = load_decoder(directory, torch.float32, CPU)
    rows = rows_of(family)
    tokens = torch.tensor([token for row, _ in rows for token in row])
    offsets = torch.tensor([0, *(len(row) for row, _ in rows)]).cumsum(0)
    with torch.no_grad(), ours.with_pictures(pass_of(ours, rows)):
        logits = ours.logits(ours.hidden(tokens, offsets))
    for index, (text, spans) in enumerate(rows):
        expected = their_logits(theirs, ours, text, spans)
        assert expected.std() > 0.3
        torch.testing.assert_close(logits[offsets[index] : offsets[index + 1]], expected, atol=2e-4, rtol=1e-4)
