"""Images and videos of rows, from files to placeholder tokens."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from burnish.config.data import Data, Source, Template
from burnish.config.errors import UserError
from burnish.data.curation.output_files import encode_rows
from burnish.data.curation.prepare import PrepareOptions, prepare
from burnish.data.gui_actions import write_click
from burnish.data.images import ImageInput, VideoInput, image_input, media_of, video_input
from burnish.data.preference_pairs import EncodingOptions, load_pairs
from burnish.data.prompt_pool import make_pools
from burnish.data.row import Row
from burnish.data.row_formats import read_rows, source_records
from burnish.data.supervised import encode_example, load_examples
from burnish.data.template import render
from burnish.models.tokenizer import Tokenizer
from burnish.rewards import verifiers
from tests.made_tokenizers import byte_level
from tests.seeing_tokenizer import BLOCKS_ONLY, CHAT, IMAGE, VIDEO, scene, seeing_tokenizer

SEEN = scene()
TOKENS = 6  # of a scene: 2 rows of 3 patches


def png(pixels: np.ndarray = SEEN) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def data_url(pixels: np.ndarray = SEEN) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def rows_of(tmp_path: Path, *records: dict[str, Any]) -> list[Row]:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_rows(Source(path="d.jsonl"), tmp_path)


def blocks(*content: Any) -> list[dict[str, Any]]:
    found = [{"type": "text", "text": c} if isinstance(c, str) else {"type": "image", "image": c} for c in content]
    return [{"role": "user", "content": found}]


# --- what may stand for an image ----------------------------------------------------------------------------------------


def test_every_form_of_an_image_has_the_same_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    forms: list[Any] = [
        png(), "a.png", f"file://{tmp_path}/a.png", tmp_path / "a.png", data_url(), {"bytes": png(), "path": "gone.png"},
        {"bytes": base64.b64encode(png()).decode()}, {"bytes": None, "path": "a.png"}, {"image": "a.png"},
        {"url": data_url()}, Image.fromarray(SEEN), SEEN,
    ]  # fmt: skip
    for form in forms:
        assert np.array_equal(image_input(form, "it", tmp_path).load(), SEEN), form


def test_transparency_is_white_gray_is_rgb_and_a_photo_stands_upright() -> None:
    clear = Image.new("RGBA", (4, 2), (9, 9, 9, 0))
    assert image_input(clear, "it").load().tolist() == np.full((2, 4, 3), 255).tolist()
    assert image_input(np.full((2, 4), 7, dtype=np.uint8), "it").load().shape == (2, 4, 3)
    photo, stream = Image.new("RGB", (4, 2)), io.BytesIO()
    exif = photo.getexif()
    exif[274] = 6  # turned by 90 degrees
    photo.save(stream, format="JPEG", exif=exif)
    assert image_input(stream.getvalue(), "it").load().shape == (4, 2, 3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"no image", "it: the bytes cannot be read as an image"),
        (png()[:90], "is damaged|cannot be read"),
        ("https://a.org/a.png", "does not fetch"),
        ("data:text/plain;base64,AAAA", "should be data:image/"),
        ("data:image/png;base64,?", "not valid base64"),
        (np.zeros((2, 2, 3)), "should be uint8"),
        (3, "should be an image"),
        ({"image": "a", "resized_height": 4}, "'resized_height' of an image is not used"),
        ({}, "should hold one image under bytes"),
    ],
)
def test_what_is_no_image_is_explained(value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        image_input(value, "it").load()


def test_an_image_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.data.images.MAX_SOURCE_PIXELS", 100)
    with pytest.raises(UserError, match="24 x 16 pixels; the limit is 100"):
        image_input(png(), "it").load()


def test_videos_are_frames_an_array_or_an_animated_image(tmp_path: Path) -> None:
    frames = [scene(seed=k) for k in range(3)]
    Image.fromarray(frames[0]).save(
        tmp_path / "a.webp", save_all=True, append_images=list(map(Image.fromarray, frames[1:])), lossless=True
    )
    for value in (frames, np.stack(frames), [png(f) for f in frames], "a.webp", {"video": frames, "fps": 2.0}):
        video = video_input(value, "it", tmp_path)
        assert video.frames_per_second == 2.0
        assert np.array_equal(np.stack(video.load()), np.stack(frames))
    with pytest.raises(UserError, match="should have one size"):
        video_input([scene(), scene(8)], "it").load()


# --- rows ---------------------------------------------------------------------------------------------------------------


def test_rows_of_other_systems_have_their_images_at_the_marks(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    empty = [{"type": "image"}, {"type": "text", "text": "many?"}]
    shown = [{"from": "human", "value": "<image>many?"}, {"from": "gpt", "value": "5 <image>"}]
    found = rows_of(
        tmp_path,
        {"prompt": [{"role": "user", "content": "<image>many?"}], "images": [{"bytes": None, "path": "a.png"}]},
        {"prompt": "<image>many?", "images": [data_url()]},
        {"prompt": [{"role": "user", "content": empty}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": "many?"}], "image": "a.png"},
        {"question": "<image>many?", "images": "a.png", "answer": "5"},
        {"conversations": shown, "image": "a.png"},
        {"prompt": blocks({"path": "a.png"}, "many?")},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, empty[1]]}]},
    )
    expected = blocks(ImageInput(SEEN), "many?")
    for row in found:
        (message,) = row.prompt
        assert isinstance(message, dict)
        assert [b.get("text") for b in message["content"]] == [None, "many?"]
        assert np.array_equal(message["content"][0]["image"].load(), SEEN)
        assert "images" not in row.extra
        assert "image" not in row.extra
    assert rows_of(tmp_path, {"prompt": "a tag <image> in HTML"})[0].prompt == "a tag <image> in HTML"
    assert media_of(expected) == [ImageInput(SEEN)]


def test_paths_are_relative_to_the_file_of_their_own_row(tmp_path: Path) -> None:
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "a.png").write_bytes(png(scene(seed=seed)))
        (folder / "d.jsonl").write_text(json.dumps({"prompt": "<image>x", "images": ["a.png"]}))
    rows = read_rows(Source(path="*/d.jsonl"), tmp_path)
    for row, seed in zip(rows, (1, 2), strict=True):
        assert np.array_equal(media_of(row.prompt)[0].load(), scene(seed=seed))  # type: ignore[arg-type]


def test_images_of_several_turns_and_videos_go_to_their_own_marks(tmp_path: Path) -> None:
    first, second = scene(seed=1), scene(seed=2)
    turns = [
        {"role": "user", "content": "<image> and <video>?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "then <image>"},
    ]
    videos = [[data_url(second), data_url(first)]]
    (row,) = rows_of(tmp_path, {"prompt": turns, "images": [data_url(first), data_url(second)], "videos": videos})
    one, video, two = media_of(row.prompt)  # type: ignore[arg-type]
    assert isinstance(one, ImageInput)
    assert isinstance(two, ImageInput)
    assert isinstance(video, VideoInput)
    assert np.array_equal(one.load(), first)
    assert np.array_equal(two.load(), second)
    assert np.array_equal(video.load()[0], second)


def test_parquet_of_verl_with_bytes_is_read_and_alpaca_joins_its_input(tmp_path: Path) -> None:
    record = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": png(), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0},
    }
    pq.write_table(pa.Table.from_pylist([record, {**record, "images": []}]), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"d\.parquet, row 2: prompt has 1 image marks .* has 0 images"):
        read_rows(Source(path="d.parquet"), tmp_path)
    (row,) = read_rows(Source(path="d.parquet", limit=1), tmp_path)
    assert (row.answer, row.extra["split"]) == ("3", "train")
    (image,) = media_of(row.prompt)  # type: ignore[arg-type]
    assert np.array_equal(image.load(), SEEN)
    (row,) = rows_of(tmp_path, {"instruction": "<image>Name it.", "input": "In German.", "images": data_url()})
    assert [b.get("text") for b in row.prompt[0]["content"]] == [None, "Name it.", "\nIn German."]  # type: ignore[index]


# --- tokens -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHAT, BLOCKS_ONLY])
def test_marks_of_the_template_become_placeholders_and_marks_of_a_user_stay_text(template: str) -> None:
    tokenizer = seeing_tokenizer(template)
    said = f"look {IMAGE} <image>"
    text, tokens, pictures = render(Row("r", blocks(SEEN, said, scene(8, 8)), "s", None), tokenizer, Template())
    (image, _) = tokenizer._inner.convert_tokens_to_ids([IMAGE, VIDEO])
    assert tokens.count(image) == TOKENS + 1
    assert [(span.start, span.picture.grid) for span in pictures] == [
        (tokens.index(image), (1, 2, 3)),
        (len(tokens) - 1 - tokens[::-1].index(image), (1, 1, 1)),
    ]
    assert np.array_equal(pictures[0].picture.pixels[0], SEEN)
    assert said in text
    assert said.encode() in tokenizer.decode(tokens, skip_special=False).encode()
    plain = render(Row("r", "1+1?", "s", None), tokenizer, Template(system="s"))
    assert plain.pictures == ()
    assert "system\ns<|im_end|>" in plain.text
    assert "user\n1+1?<|im_end|>" in plain.text


def test_a_plain_template_has_the_model_s_own_mark() -> None:
    tokenizer = seeing_tokenizer(None)
    text, tokens, pictures = render(Row("r", blocks(SEEN, " x"), "s", None), tokenizer, Template(text="Q: {prompt}"))
    assert text == f"Q: <|vision_start|>{IMAGE}<|vision_end|> x"
    assert len(pictures) == 1
    assert len(tokens) == len("Q: ") + 1 + TOKENS + 1 + len(" x")


def test_a_text_model_refuses_images_and_so_does_a_template_without_a_place_for_them() -> None:
    row = Row("r", blocks(SEEN, "x"), "s", None)
    with pytest.raises(UserError, match="an image is given, but this model reads text only"):
        render(row, byte_level(chat_template=CHAT, additional_special_tokens=[IMAGE]), Template())
    blind = CHAT.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    with pytest.raises(UserError, match="wrote 0 marks for 1 images"):
        render(row, seeing_tokenizer(blind), Template())
    with pytest.raises(UserError, match="stands for nothing"):
        render(Row("r", f"{IMAGE} x", "s", None), seeing_tokenizer(), Template(kind="prerendered"))


def test_pools_have_pictures_count_their_tokens_and_see_changed_images(tmp_path: Path) -> None:
    def pool(pixels: np.ndarray, longest: int = 99) -> Any:
        (tmp_path / "a.png").write_bytes(png(pixels))
        (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "<image>x", "images": ["a.png"]}))
        data = Data(max_prompt_tokens=longest)
        return make_pools([Source(path="d.jsonl")], seeing_tokenizer(), data, 0, "train", tmp_path)[0]

    prompt = pool(SEEN).prompt(0)
    assert [span.picture.num_tokens for span in prompt.pictures] == [TOKENS]
    assert pool(SEEN, len(prompt.tokens)).prompt(0) is not None
    assert pool(SEEN, len(prompt.tokens) - 1).prompt(0) is None
    assert pool(SEEN).digest == pool(SEEN).digest != pool(scene(seed=5)).digest


def test_supervised_rows_and_pairs_have_pictures_in_their_context_only(tmp_path: Path) -> None:
    tokenizer = seeing_tokenizer()
    turns = [
        *blocks(SEEN, "a?"),
        {"role": "assistant", "content": "b"},
        *blocks("c", scene(8, 8)),
        {"role": "assistant", "content": "d"},
    ]
    tokens, mask, pictures = encode_example(Row("r", [], "s", None, messages=turns), tokenizer, Template())
    for span in pictures:
        assert set(tokens[span.start : span.end]) == {tokenizer.image_processor.image_mark}  # type: ignore[union-attr]
        assert not any(mask[span.start : span.end])
    assert [span.picture.num_tokens for span in pictures] == [TOKENS, 1]
    assert (
        tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m], skip_special=False)
        == "b<|im_end|>d<|im_end|>"
    )

    record = {"prompt": "<image>a?", "images": [data_url()]}
    (tmp_path / "s.jsonl").write_text(json.dumps({**record, "completion": "b"}))
    (tmp_path / "p.jsonl").write_text(json.dumps({**record, "chosen": "b", "rejected": "c"}))
    (example,), _ = load_examples([Source(path="s.jsonl")], tokenizer, Template(), 99, "error", tmp_path)
    (pair,), _ = load_pairs([Source(path="p.jsonl")], EncodingOptions(tokenizer, Template(), 99, base=tmp_path))
    for one in (example, pair.chosen, pair.rejected):
        assert [(s.start, s.picture.key) for s in one.pictures] == [(s.start, s.picture.key) for s in pictures[:1]]


def test_the_processor_of_a_directory_comes_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = seeing_tokenizer(), list[Any]()
    made.save(tmp_path)
    assert Tokenizer.load(tmp_path).image_processor is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    monkeypatch.setattr(
        "burnish.models.vision.processors.load_processor", lambda *given: asked.append(given) or made.image_processor
    )
    assert Tokenizer.load(tmp_path, (64, 256)).image_processor is made.image_processor
    assert asked == [(tmp_path, (64, 256))]


# --- published data sets ----------------------------------------------------------------------------------------------


def test_geometry_and_clevr_are_read_as_published_and_as_prepared(tmp_path: Path) -> None:
    figure = {"images": [{"bytes": png(), "path": "x.png"}], "problem": "<image>Find x.", "answer": "3"}
    pq.write_table(pa.Table.from_pylist([figure]), tmp_path / "geometry.parquet")
    for folder in ("images/val", "questions"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "images/val/CLEVR_val_000000.png").write_bytes(png())
    asked = {"image_filename": "CLEVR_val_000000.png", "split": "val", "question": "How many?", "answer": "5"}
    (tmp_path / "questions/val.json").write_text(json.dumps({"info": {}, "questions": [asked, asked]}))
    counted = {"image": data_url(), "problem": "How many?", "solution": "<answer> 5 </answer>"}
    (tmp_path / "counted.jsonl").write_text(json.dumps(counted))
    for name, path, answer, num in (
        ("geometry3k", "geometry.parquet", "3", 1),
        ("clevr", "questions/val.json", ["5"], 2),
        ("clevr", "counted.jsonl", ["5"], 1),
    ):
        prepare(PrepareOptions(name, str(tmp_path / path)), tmp_path / "elsewhere/out.parquet")
        raw = read_rows(Source(path=path, shape=name), tmp_path)
        prepared = read_rows(Source(path="elsewhere/out.parquet"), tmp_path)
        assert len(raw) == len(prepared) == num
        for row in (*raw, *prepared):
            (image,) = media_of(row.prompt)  # type: ignore[arg-type]
            assert np.array_equal(image.load(), SEEN)
            assert (row.answer, row.data_source) == (answer, name)
            assert row.prompt[0]["content"][0]["type"] == "image"  # type: ignore[index]
    screen = {"image": {"bytes": png(), "path": None}, "instruction": "open it", "history": None, "gt_action": "click"}
    screen |= {"gt_bbox": [0.25, 0.5, 0.5, 1.0], "gt_input_text": "no input text"}
    pq.write_table(pa.Table.from_pylist([screen]), tmp_path / "gui.parquet")
    (row,) = read_rows(Source(path="gui.parquet", shape="gui_r1"), tmp_path)
    for point, value in (((8, 12), 1.0), ((8, 3), 0.2)):  # the scene is 24 x 16
        assert verifiers.gui_r1(write_click(*point), row.answer, row.extra) == pytest.approx(value)
    assert [block["type"] for block in row.prompt[0]["content"]] == ["text", "image", "text"]  # type: ignore[index]
    gone = tmp_path / "images/val/CLEVR_val_000000.png"
    gone.unlink()
    with pytest.raises(UserError, match=r"val\.json:1, questions\[0\]: images\[0\]: no such file"):
        read_rows(Source(path="questions/val.json", shape="clevr"), tmp_path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_with_images_are_written_and_read_back(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a.png").write_bytes(png())
    records = [
        {
            "prompt": [{"role": "user", "content": "look <image> at <image>"}],
            "images": ["a.png", data_url(scene(8, 8))],
        },
        {"prompt": [{"role": "user", "content": "no picture"}]},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    read = [record for _, record in source_records(Source(path="d.jsonl"), tmp_path)]
    drawn = {"prompt": blocks(SEEN, "drawn")}  # as a task gives it
    (tmp_path / f"out{suffix}").write_bytes(encode_rows([*read, drawn], suffix))
    rows = read_rows(Source(path=f"out{suffix}"), tmp_path)
    assert [row.prompt for row in rows] == [
        read[0]["prompt"],
        read[1]["prompt"],
        blocks(rows[2].prompt[0]["content"][0]["image"], "drawn"),
    ]  # type: ignore[index]
    assert np.array_equal(media_of(rows[2].prompt)[0].load(), SEEN)  # type: ignore[arg-type]


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"images need pillow: pip install 'burnish\[vision\]'"):
        image_input(b"...", "it").load()
    assert np.array_equal(image_input(SEEN, "it").load(), SEEN)
