"""The processor of Qwen2.5-VL and Qwen3-VL: pixels and tokens of transformers' processor, limits, videos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from burnish.config.errors import UserError
from burnish.models.vision.interfaces import PixelLimits
from burnish.models.vision.processors import MODEL_LIMITS, load_processor
from burnish.models.vision.qwen_processor import QwenProcessor
from burnish.models.vision.qwen_tower import cut_patches
from tests.models.vision.conftest import TinyVision

CPU = torch.device("cpu")
LIMITS = {"min_pixels": 40 * 40, "max_pixels": 100 * 100}


def processor_of(
    directory: Path, tmp_path: Path, limits: PixelLimits = MODEL_LIMITS, **keys: Any
) -> tuple[QwenProcessor, Qwen2VLImageProcessorPil]:
    """Ours and transformers' processor of a tiny model, whose directory gets a tokenizer of characters."""
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    half = {} if config["model_type"] == "qwen2_5_vl" else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    theirs = Qwen2VLImageProcessorPil(patch_size=4, **LIMITS, **half)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    words = {character: index for index, character in enumerate("<>. seconds0123456789")}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_processor(tmp_path, limits)
    assert isinstance(ours, QwenProcessor)
    return ours, theirs


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("size", [(64, 72), (13, 30), (200, 90), (41, 41)])
def test_pixels_and_tokens_of_images_are_those_of_transformers(
    tiny_vision: TinyVision, tmp_path: Path, family: str, size: tuple[int, int]
) -> None:
    ours, theirs = processor_of(tiny_vision(family)[1], tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = theirs(images=[image], return_tensors="pt")
    found = ours.image(image)
    (span,) = found.pictures
    frames, rows, columns = expected["image_grid_thw"][0].tolist()
    assert span.picture.grid == (frames, rows // 2, columns // 2)
    assert found.tokens == [50] * (frames * rows * columns // 4)
    patches = cut_patches([span.picture], ours.shape, CPU)
    torch.testing.assert_close(patches, expected["pixel_values"], atol=1e-5, rtol=1e-5)


def test_limits_of_the_user_replace_those_of_the_model(tiny_vision: TinyVision, tmp_path: Path) -> None:
    image = np.zeros((400, 400, 3), dtype=np.uint8)
    directory = tiny_vision("qwen2_5_vl")[1]
    plain, _ = processor_of(directory, tmp_path)
    assert plain.image(image).pictures[0].picture.pixels.shape == (1, 96, 96, 3)
    small, _ = processor_of(directory, tmp_path, PixelLimits(most=30 * 30))
    assert small.image(image).pictures[0].picture.pixels.shape == (1, 24, 24, 3)
    large, _ = processor_of(directory, tmp_path, PixelLimits(least=500 * 500))
    assert large.image(image).pictures[0].picture.pixels.shape == (1, 504, 504, 3)


def test_a_video_of_qwen25_is_one_picture_and_one_of_qwen3_has_time_stamps(
    tiny_vision: TinyVision, tmp_path: Path
) -> None:
    frames = [np.full((64, 64, 3), shade, dtype=np.uint8) for shade in (0, 50, 100, 150, 200)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, _ = processor_of(tiny_vision("qwen2_5_vl")[1], tmp_path / "a", PixelLimits(most=64 * 64))
    one = first.video(frames, 2.0)
    (span,) = one.pictures
    assert (span.picture.grid, span.picture.seconds_per_frame) == ((3, 8, 8), 1.0)
    assert one.tokens == [51] * 192
    second, _ = processor_of(tiny_vision("qwen3_vl")[1], tmp_path / "b")
    three = second.video(frames, 2.0)
    rows, columns = three.pictures[0].picture.grid[1:]
    expected: list[int] = []
    for stamp in ("<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"):
        expected += [*second.encode(stamp), 52, *[51] * (rows * columns), 53]
    assert three.tokens == expected
    assert [three.tokens[span.start - 1] for span in three.pictures] == [52] * 3
    assert [span.picture.pixels.shape[0] for span in three.pictures] == [2, 2, 1]
    # The model's limits count all frames: 6 of 152 x 152 pixels are just above 128 x 32 x 32.
    assert second.video_limits[0] <= 6 * rows * columns * 64 <= second.video_limits[1]


def test_a_file_that_contradicts_the_tower_is_an_error_that_names_it(tiny_vision: TinyVision, tmp_path: Path) -> None:
    directory = tiny_vision("qwen3_vl")[1]
    with pytest.raises(UserError, match=r"preprocessor_config.json: patch_size is 14, but the vision tower has 4"):
        processor_of(directory, tmp_path, patch_size=14)
    with pytest.raises(UserError, match=r"image_mean is \[0.1, 0.1, 0.1\]"):
        processor_of(directory, tmp_path, image_mean=[0.1] * 3)
    ours, _ = processor_of(directory, tmp_path)
    with pytest.raises(UserError, match="900 x 2 pixels"):
        ours.image(np.zeros((2, 900, 3), dtype=np.uint8))
