"""Processors of Idefics3, SmolVLM and Gemma 3: pixels and tokens equal those of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor as TheirGemma3
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor as TheirIdefics3

from burnish.config.data import Source, Template
from burnish.config.errors import UserError
from burnish.data.row_formats import prompt_row
from burnish.data.template import render
from burnish.models.tokenizer import Tokenizer
from burnish.models.vision.interfaces import Expansion, ImageProcessor
from burnish.models.vision.processors import MODEL_LIMITS, PixelLimits, load_processor
from burnish.models.vision.siglip_processors import number_words

TILE = 24
VISION = {"hidden_size": 16, "image_size": TILE, "patch_size": 2}
SIZES = [(24, 24), (17, 50), (90, 31), (10, 10), (200, 190), (5, 40)]
NAMES = ["<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
NAMES += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def byte_tokenizer(names: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    """Bytes with tokens of two and three newlines, and control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, "ĊĊ", "ĊĊĊ"]
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(names))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def directory_of(path: Path, model: dict[str, Any], image_processor: Any, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(str(path))
    image_processor.save_pretrained(str(path))
    (path / "config.json").write_text(json.dumps(model))
    return path


def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in SIZES]


def normalised(expansion: Expansion) -> np.ndarray:
    """The pixels of all pictures as a tower normalises them, [pictures, 3, height, width]."""
    pixels = np.concatenate([span.picture.pixels for span in expansion.pictures]).transpose(0, 3, 1, 2)
    return (pixels.astype(np.float32) / 255 - 0.5) / 0.5


def check_spans(expansion: Expansion, placeholders: frozenset[int]) -> None:
    """Every placeholder belongs to exactly one picture."""
    covered = [token for span in expansion.pictures for token in range(span.start, span.end)]
    assert covered == [i for i, token in enumerate(expansion.tokens) if token in placeholders]


def idefics3(tmp_path: Path, limits: PixelLimits = MODEL_LIMITS, **options: Any) -> tuple[ImageProcessor, Any]:
    tokenizer = byte_tokenizer(NAMES)
    theirs = Idefics3ImageProcessorPil(
        max_image_size={"longest_edge": TILE}, size={"longest_edge": 4 * TILE}, **options
    )
    token = tokenizer.convert_tokens_to_ids("<image>")
    model = {
        "model_type": "idefics3",
        "image_token_id": token,
        "vision_config": VISION,
        "text_config": {"hidden_size": 8},
        "scale_factor": 3,
    }
    found = load_processor(directory_of(tmp_path, model, theirs, tokenizer), limits)
    assert found is not None
    return found, TheirIdefics3(theirs, tokenizer, image_seq_len=16)


@pytest.mark.parametrize("is_split", [True, False])
def test_idefics3_has_the_tiles_and_tokens_of_transformers(tmp_path: Path, is_split: bool) -> None:
    ours, theirs = idefics3(tmp_path, do_image_splitting=is_split)
    for image in images():
        expansion = ours.image(image)
        wanted = theirs(text="<image>", images=[image], return_tensors="np")
        assert expansion.tokens == wanted["input_ids"][0].tolist()
        np.testing.assert_allclose(normalised(expansion), wanted["pixel_values"][0], atol=1e-6)
        check_spans(expansion, ours.placeholder_tokens)


def test_limits_change_the_number_of_tiles(tmp_path: Path) -> None:
    image = images()[4]
    free = idefics3(tmp_path)[0].image(image)
    few = idefics3(tmp_path, PixelLimits(None, 4 * TILE**2))[0].image(image)
    many = idefics3(tmp_path, PixelLimits(5 * 5 * TILE**2, None))[0].image(image)
    assert [len(found.pictures) for found in (few, free, many)] == [4 + 1, 16 + 1, 25 + 1]
    with pytest.raises(UserError, match=r"model\.image_pixels.*tiles of 24"):
        idefics3(tmp_path, PixelLimits(None, TILE**2 - 1))
    with pytest.raises(UserError, match="do_image_splitting=false"):
        idefics3(tmp_path, PixelLimits(None, 4 * TILE**2), do_image_splitting=False)


def test_a_video_of_smolvlm_has_a_time_stamp_before_each_frame(tmp_path: Path) -> None:
    ours, theirs = idefics3(tmp_path)
    tokenizer = theirs.tokenizer
    expansion = ours.video(images()[:3], 0.02)
    check_spans(expansion, ours.placeholder_tokens)
    text = tokenizer.decode(expansion.tokens).replace("<image>" * 16, "<image>")
    tile = "<fake_token_around_image><global-img><image><fake_token_around_image>"
    assert text == (
        "You are provided the following series of three frames from a 0:02:30 [H:MM:SS] video.\n"
        f"\nFrame from 00:00:{tile}\nFrame from 00:50:{tile}\nFrame from 01:40:{tile}"
    )
    assert ours.video_mark is not None
    assert ours.texts_around[ours.video_mark] == ("", "\n\n")


def test_number_words_are_those_of_num2words() -> None:
    words = {7: "seven", 20: "twenty", 64: "sixty-four", 100: "one hundred", 128: "one hundred and twenty-eight"}
    words |= {1000: "one thousand", 1001: "one thousand and one", 1300: "one thousand, three hundred"}
    assert {number: number_words(number) for number in words} == words


def gemma3(tmp_path: Path, limits: PixelLimits = MODEL_LIMITS, **options: Any) -> tuple[ImageProcessor, Any]:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = byte_tokenizer(["<start_of_turn>", *names.values()], extra_special_tokens=names)
    theirs = Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE}, **options)
    boi, eoi, token = (tokenizer.convert_tokens_to_ids(name) for name in names.values())
    model = {
        "model_type": "gemma3",
        "boi_token_index": boi,
        "eoi_token_index": eoi,
        "image_token_index": token,
        "vision_config": VISION,
        "mm_tokens_per_image": 16,
    }
    found = load_processor(directory_of(tmp_path, model, theirs, tokenizer), limits)
    assert found is not None
    return found, TheirGemma3(theirs, tokenizer, image_seq_length=16)


def test_gemma3_has_the_pixels_and_tokens_of_transformers(tmp_path: Path) -> None:
    ours, theirs = gemma3(tmp_path)
    tokenizer, mark = theirs.tokenizer, "<start_of_image>"
    before, after = ours.texts_around[ours.image_mark]
    prompt = f"<start_of_turn>user\n{mark}What?{mark}\nAnd here?"
    some = images()[1:3]
    wanted = theirs(text=prompt, images=[some], return_tensors="np")
    framed = tokenizer.encode(prompt.replace(mark, before + mark + after), add_special_tokens=False)
    expansions = iter([ours.image(image) for image in some])
    found: list[int] = []
    for token in framed:
        found += next(expansions).tokens if token == ours.image_mark else [token]
    assert found == wanted["input_ids"][0].tolist()
    for image, pixels in zip(some, wanted["pixel_values"], strict=True):
        expansion = ours.image(image)
        np.testing.assert_allclose(normalised(expansion)[0], pixels, atol=1e-6)
        check_spans(expansion, ours.placeholder_tokens)


GEMMA_CHAT = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_a_rendered_prompt_of_gemma3_has_the_tokens_of_transformers(tmp_path: Path, kind: str) -> None:
    """The newline before the image becomes one token with the two of the processor. A mark that the user wrote stays text."""
    _, theirs = gemma3(tmp_path)
    image = images()[1]
    (tmp_path / "chat_template.jinja").write_text(GEMMA_CHAT)
    tokenizer = Tokenizer.load(tmp_path)
    blocks = [{"type": "image", "image": image}, {"type": "text", "text": "What? <start_of_image>"}]
    record = {"prompt": [{"role": "user", "content": blocks}], "answer": "a"}
    found = render(prompt_row(record, "here", Source(path="x"), 0), tokenizer, Template(kind=kind))
    before = "<start_of_turn>user\n" if kind == "chat" else ""
    wanted = theirs(text=f"{before}<start_of_image>What? ", images=[[image]])["input_ids"][0]
    assert found.tokens[: len(wanted)] == list(wanted)
    assert found.tokens[len(wanted) :] == [tokenizer.encode(letter)[0] for letter in "<start_of_image>"]
    (span,) = found.pictures
    assert tokenizer.decode(found.tokens[span.start : span.end], skip_special=False) == "<image_soft_token>" * 16


def test_gemma3_reads_one_size_and_no_videos(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="every image at 24 x 24"):
        gemma3(tmp_path, PixelLimits(None, 100))
    with pytest.raises(UserError, match="do_pan_and_scan"):
        gemma3(tmp_path, do_pan_and_scan=True)
    with pytest.raises(UserError, match="image_mean"):
        gemma3(tmp_path, image_mean=[0.4, 0.5, 0.5])
    with pytest.raises(UserError, match="frames as images"):
        gemma3(tmp_path)[0].video(images()[:1], 1.0)


def test_a_directory_without_a_preprocessor_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": VISION}))
    with pytest.raises(UserError, match=r"preprocessor_config\.json"):
        load_processor(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_processor(tmp_path) is None
