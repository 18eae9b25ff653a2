"""Idefics3, SmolVLM and Gemma 3 in the native decoder: logits, files and gradients agree with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from burnish.core.pictures import PictureSpan
from burnish.models.architecture import architecture_from_hf, architecture_to_hf, why_not_native
from burnish.models.decoder import Decoder
from burnish.models.vision.pieces import Piece, piece_pass
from burnish.models.vision.siglip_shape import why_unsupported
from burnish.models.weight_files import load_decoder, save_decoder
from tests.models.vision.tiny_siglip import FAMILIES, Row, row, rows_of, siglip_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family, its model of transformers, and the directory that it was saved to."""
    model, directory = siglip_model(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return request.param, model, directory


def their_logits(model: Any, tokens: list[int], spans: tuple[PictureSpan, ...]) -> Tensor:
    """transformers' logits [L, vocab] of one row."""
    inputs: dict[str, Any] = {}
    ids = torch.tensor([tokens])
    if spans:
        pixels = torch.from_numpy(np.concatenate([span.picture.pixels for span in spans]))
        values = ((pixels.float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2).to(model.dtype)
        inputs["pixel_values"] = values if model.config.model_type == "gemma3" else values[None]
    if model.config.model_type == "gemma3":
        inputs["token_type_ids"] = (ids == model.config.image_token_id).long()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]


def packed(rows: list[Row]) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([token for tokens, _ in rows for token in tokens])
    return tokens, torch.tensor([0, *(len(tokens) for tokens, _ in rows)]).cumsum(0)


def our_logits(ours: Decoder, rows: list[Row], shared: Tensor | None = None) -> Tensor:
    tokens, offsets = packed(rows)
    assert ours.arch.vision is not None
    pieces = [Piece(0, len(tokens), spans) for tokens, spans in rows]
    with ours.with_pictures(piece_pass(pieces, ours.arch.vision, CPU)):
        return ours.logits(ours.hidden(tokens, offsets, shared_prefix=shared))


def test_packed_logits_of_rows_with_pictures_are_those_of_transformers(saved: tuple[str, Any, Path]) -> None:
    family, theirs, directory = saved
    ours, rows = load_decoder(directory, torch.float32, CPU), rows_of(family)
    with torch.no_grad():
        found = our_logits(ours, rows).split([len(tokens) for tokens, _ in rows])
        for (tokens, spans), logits in zip(rows, found, strict=True):
            expected = their_logits(theirs, tokens, spans)
            assert expected.std() > 0.3
            torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


def test_gradients_of_tower_and_decoder_are_those_of_transformers(saved: tuple[str, Any, Path]) -> None:
    """A group of three with a shared prompt that has two pictures, computed once; theirs row by row."""
    family, theirs, directory = saved
    ours = load_decoder(directory, torch.float32, CPU)
    tokens, spans = rows_of(family)[1]
    rows = [([*tokens, *row(seed, 5)[0]], spans) for seed in (7, 8, 9)]
    weights = torch.randn(sum(len(tokens) for tokens, _ in rows), 64, generator=torch.Generator().manual_seed(0))
    (our_logits(ours, rows, torch.tensor([0, len(tokens), len(tokens)])) * weights).sum().backward()
    theirs.zero_grad()
    expected = torch.cat([their_logits(theirs, *each) for each in rows])
    (expected * weights).sum().backward()
    inner = theirs.model
    pairs = {
        "layers.1.out.weight": "language_model.layers.1.self_attn.o_proj.weight",
        "vision.encoder.encoder.layers.0.mlp.fc1.weight": "vision_tower.encoder.layers.0.mlp.fc1.weight",
        "vision.connector.mm_input_projection_weight": "multi_modal_projector.mm_input_projection_weight",
    }
    if family != "gemma3":
        pairs = {
            "layers.1.out.weight": "text_model.layers.1.self_attn.o_proj.weight",
            "vision.encoder.encoder.layers.0.mlp.fc1.weight": "vision_model.encoder.layers.0.mlp.fc1.weight",
            "vision.connector.proj.weight": "connector.modality_projection.proj.weight",
        }
    for name, their_name in pairs.items():
        found, wanted = ours.get_parameter(name).grad, inner.get_parameter(their_name).grad
        assert found is not None
        assert (found - wanted).norm() < 1e-3 * wanted.norm(), name


def test_a_saved_model_loads_in_transformers(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, theirs, directory = saved
    save_decoder(load_decoder(directory, torch.float32, CPU), tmp_path, directory)
    read, info = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    own, again = theirs.state_dict(), read.state_dict()
    assert all(torch.equal(own[name], again[name]) for name in own)


def test_the_config_of_a_new_model_is_read_back(saved: tuple[str, Any, Path]) -> None:
    _, theirs, directory = saved
    config = json.loads((directory / "config.json").read_text())
    assert why_not_native(config) is None
    arch = architecture_from_hf(config)
    written = architecture_to_hf(arch, "float32", (1,), 0)
    assert architecture_from_hf(written) == arch
    assert arch.num_parameters == sum(p.numel() for p in theirs.parameters())
    read = type(theirs.config)(**written)
    assert read.vision_config.to_dict() == theirs.config.vision_config.to_dict()


def test_published_configs_leave_out_what_transformers_assumes() -> None:
    gemma = {
        "model_type": "gemma3",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16,
                          "num_hidden_layers": 27, "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    }  # fmt: skip
    assert why_not_native(gemma) is None
    arch = architecture_from_hf(gemma)
    assert (arch.vocab_size, arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.tied) == (262_208, 8, 4, 256, True)
    assert arch.vision is not None
    assert 4.2e9 < arch.num_parameters < 4.4e9
    assert 4.1e8 < arch.vision.num_parameters < 4.3e8
    smol = {
        "model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 4, "tie_word_embeddings": False,
        "vision_config": {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16},
        "text_config": {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "vocab_size": 49280,
                        "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000, "head_dim": 64},
    }  # fmt: skip
    assert why_not_native(smol) is None
    assert 2.5e8 < architecture_from_hf(smol).num_parameters < 2.6e8
    mistral = smol | {"text_config": smol["text_config"] | {"model_type": "mistral"}}  # type: ignore[operator]
    assert "mistral" in (why_unsupported(mistral) or "")
