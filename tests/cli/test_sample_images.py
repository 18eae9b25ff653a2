"""`burnish sample --image`, `burnish eval` and `Policy` with a tiny model that sees, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import burnish
from burnish.cli import main as cli
from burnish.models.tokenizer import Tokenizer
from tests.seeing_tokenizer import IMAGE, scene
from tests.tiny_seeing_model import PIXELS, write_tiny_seeing_model

SEEN = scene(40, 24)
NEW = 12


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("seeing")
    model = write_tiny_seeing_model(directory)
    Image.fromarray(SEEN).save(directory / "a.png")
    return directory, model


def expected_text(directory: Path, model: Any) -> str:
    """What transformers generates greedily for the image and the question."""
    tokenizer = Tokenizer.load(directory)
    given = Qwen2VLImageProcessorPil(patch_size=4, **PIXELS)(images=[SEEN], return_tensors="pt")
    mark = tokenizer._inner.convert_tokens_to_ids(IMAGE)
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>many?<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode(text)
    at = tokens.index(mark)
    tokens[at : at + 1] = [mark] * (int(given["image_grid_thw"].prod()) // 4)
    ids = torch.tensor([tokens])
    types = (ids == mark).long()
    with torch.no_grad():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, do_sample=False,
            max_new_tokens=NEW, suppress_tokens=[mark, mark + 1], **given,
        )  # fmt: skip
    return tokenizer.decode(found[0, len(tokens) :].tolist())


def sampled(directory: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    fixed = ["--temperature", "0", "--max-tokens", str(NEW), "--device", "cpu", "--dtype", "float32"]
    assert cli.main(["sample", str(directory), *arguments, *fixed]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_sampling_reads_the_image_as_transformers_does(
    seeing: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, model = seeing
    found = sampled(directory, capsys, "many?", "--image", str(directory / "a.png"))
    assert found == expected_text(directory, model)
    assert sampled(directory, capsys, "<image>many?", "--image", str(directory / "a.png")) == found
    assert sampled(directory, capsys, "many?") != found
    assert cli.main(["sample", str(directory), "<image><image>?", "--image", str(directory / "a.png")]) == 2
    assert "prompt has 2 image marks" in capsys.readouterr().err


def test_limits_of_pixels_change_the_number_of_tokens(seeing: tuple[Path, Any]) -> None:
    directory, _ = seeing
    prompt = {"prompt": [{"role": "user", "content": "<image>many?"}], "images": [SEEN]}
    lengths = []
    for pixels in (None, (64, 16 * 16), (64 * 64, 128 * 128)):
        policy = burnish.Policy.load(directory, device="cpu", dtype="float32", image_pixels=pixels)
        (trajectory,) = policy.sample([prompt], n=1, max_tokens=4)
        lengths.append(trajectory.metadata["prompt_length"])
        assert np.isfinite(trajectory.sequences[0].behaviour_logp).all()
    assert lengths[1] < lengths[0] < lengths[2]


def test_an_evaluation_reads_rows_with_images(
    seeing: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = seeing
    monkeypatch.chdir(tmp_path)
    row = {"question": "<image>many?", "answer": expected_text(directory, model), "images": [str(directory / "a.png")]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "answer": "another"}))
    arguments = ["--temperature", "0", "--max-tokens", str(NEW), "--device", "cpu", "--dtype", "float32"]
    status = cli.main(["eval", str(directory), "rows.jsonl", "--reward", "exact", *arguments])
    out = capsys.readouterr()
    assert status == 0, out.err
    assert "accuracy     0.500" in out.out
