"""Qwen2.5-VL and Qwen3-VL: towers, positions and whole models agree with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.core.pictures import Picture, PictureSpan
from burnish.models.architecture import architecture_from_hf, read_config, why_not_native
from burnish.models.decoder import Decoder, initialise
from burnish.models.vision.interfaces import PicturePass
from burnish.models.vision.pieces import Piece, piece_pass
from burnish.models.vision.positions import rotation_delta, rotation_positions
from burnish.models.vision.qwen_tower import cut_patches
from burnish.models.weight_files import load_decoder, save_decoder, stored_tensors
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
    return piece_pass([Piece(0, len(tokens), spans) for tokens, spans in rows], model.arch.vision, CPU)


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
    logits: Tensor = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]
    return logits


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
        expected = their_logits(theirs, ours, text, spans).detach()
        assert expected.std() > 0.3
        torch.testing.assert_close(logits[offsets[index] : offsets[index + 1]], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(tiny_vision: TinyVision, family: str) -> None:
    theirs, directory = tiny_vision(family)
    rotation = load_decoder(directory, torch.float32, CPU).arch.vision.rotation
    for tokens, spans in rows_of(family)[:3]:
        ids = torch.tensor([tokens])
        kinds = torch.zeros_like(ids).masked_fill(ids == IMAGE, 1).masked_fill(ids == VIDEO, 2)
        grids = torch.tensor([[span.picture.grid[0], *(2 * side for side in span.picture.grid[1:])] for span in spans])
        is_video = torch.tensor([span.picture.is_video for span in spans])
        options = {"second_per_grid_ts": torch.tensor([0.5])} if family == "qwen2_5_vl" else {}
        positions, delta = theirs.model.get_rope_index(ids, kinds, grids[~is_video], grids[is_video], **options)
        found = rotation_positions(len(tokens), spans, rotation)
        assert found.tolist() == positions[:, 0].tolist()
        assert rotation_delta(spans, rotation) == int(delta)
        # A prefix has the same positions, also one that ends within a picture.
        for length in (1, 7, len(tokens) - 3):
            assert rotation_positions(length, spans, rotation).tolist() == found[:, :length].tolist()


def test_text_goes_on_after_the_last_second_of_a_video(tiny_vision: TinyVision) -> None:
    theirs, directory = tiny_vision("qwen2_5_vl")
    ours = load_decoder(directory, torch.float32, CPU)
    tokens, spans = row(0, 3, random_picture((3, 1, 2), 5, seconds=1.6, frames=6), 5)
    rotation = rotation_positions(len(tokens), spans, ours.arch.vision.rotation)
    # Frames begin at 0, 6.4 and 12.8 positions, each rounded down, and text after all of them.
    assert rotation[0].tolist() == [0, 1, 2, 3, 3, 9, 9, 15, 15, 16, 17, 18, 19, 20]
    with torch.no_grad(), ours.with_pictures(pass_of(ours, [(tokens, spans)])):
        logits = ours.logits(ours.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)])))
    values = cut_patches([spans[0].picture], ours.arch.vision, CPU)
    inputs = {"pixel_values_videos": values, "video_grid_thw": torch.tensor([[3, 2, 4]])}
    with torch.no_grad():
        positions = torch.from_numpy(rotation)[:, None]
        expected = theirs(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False, **inputs).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_the_tower_as_in_transformers(tiny_vision: TinyVision, family: str) -> None:
    theirs, directory = tiny_vision(family)
    ours = load_decoder(directory, torch.float32, CPU)
    tokens, spans = rows_of(family)[1]
    with ours.with_pictures(pass_of(ours, [(tokens, spans)])):
        ours.logits(ours.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)]))).square().mean().backward()
    theirs.zero_grad()
    their_logits(theirs, ours, tokens, spans).square().mean().backward()
    expected = {name.partition("visual.")[2]: p.grad for name, p in theirs.named_parameters() if "visual." in name}
    assert ours.vision is not None
    found = {name: p.grad for name, p in ours.vision.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, atol=1e-3 * gradient.abs().max().item(), rtol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_in_transformers_and_here(tiny_vision: TinyVision, tmp_path: Path, family: str) -> None:
    theirs, directory = tiny_vision(family)
    ours = load_decoder(directory, torch.float32, CPU)
    save_decoder(ours, tmp_path, directory)
    names = {name for name, _ in stored_tensors(tmp_path)}
    assert ("visual.merger.ln_q.weight" if family == "qwen2_5_vl" else "model.visual.merger.norm.weight") in names
    again = type(theirs).from_pretrained(tmp_path)
    for (name, before), after in zip(theirs.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(before, after), name
    back = load_decoder(tmp_path, torch.float32, CPU)
    for (name, before), after in zip(ours.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(before, after), name


def test_a_published_config_is_read_although_it_is_flat(tiny_vision: TinyVision) -> None:
    _, directory = tiny_vision("qwen2_5_vl")
    nested = read_config(directory)
    text = {key: value for key, value in nested["text_config"].items() if key not in ("model_type", "rope_parameters")}
    flat = {key: value for key, value in nested.items() if key != "text_config"} | text
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 10000.0}
    assert why_not_native(flat) is None
    assert architecture_from_hf(flat) == architecture_from_hf(nested)
    odd = flat | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 1]}}
    assert "mrope_section [2, 2, 1] does not fill half of 8 dimensions" in str(why_not_native(odd))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_loads_in_transformers(tiny_vision: TinyVision, tmp_path: Path, family: str) -> None:
    theirs, directory = tiny_vision(family)
    arch = load_decoder(directory, torch.float32, CPU).arch
    assert arch.num_parameters == sum(p.numel() for p in theirs.parameters())
    model = Decoder(arch)
    initialise(model, 3, std=0.3)
    save_decoder(model, tmp_path, None, (1,), 0)
    again = type(theirs).from_pretrained(tmp_path)
    tokens, spans = rows_of(family)[1]
    with torch.no_grad(), model.with_pictures(pass_of(model, [(tokens, spans)])):
        logits = model.logits(model.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)])))
    torch.testing.assert_close(logits, their_logits(again, model, tokens, spans).detach(), atol=2e-4, rtol=1e-4)
    assert architecture_from_hf(read_config(tmp_path)) == arch
    assert (tmp_path / "preprocessor_config.json").is_file()
