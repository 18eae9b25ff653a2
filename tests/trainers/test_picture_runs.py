"""A run with images: prompts and observations that are pictures, through engine, learner, samples, journal and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.numpy import load_file

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.data.images import ImageInput
from burnish.inference.native.paged_engine import PagedEngine
from burnish.run.metrics import read_metrics
from burnish.run.picture_files import picture_file
from burnish.run.samples import read_samples
from burnish.trainers.rl_run import checked_run, execute
from burnish.training.learner import Learner
from tests.models.conftest import randomise
from tests.models.vision.conftest import QWEN25, SECTIONS, TEXT, VISION
from tests.seeing_tokenizer import MARKS, scene, seeing_tokenizer

BOARDS = """
import numpy as np
from burnish.environments.base import End, Environment, Observation


class Boards(Environment):
    takes_truncated = True

    async def start(self, episode):
        self.pixels = int(episode.images[0][0, 0, 0])
        return Observation()

    async def step(self, answer):
        if answer.turn == 1:
            return End(reward=float(len(set(answer.text)) % 3))
        board = np.full((16, 16, 3), (self.pixels + answer.num_tokens) % 256, dtype=np.uint8)
        return Observation(messages=({"role": "user", "content": [{"type": "image", "image": board}]},))
"""
RECIPE = """
model: {path: model, device: cpu, dtype: float32}
data: {train: {path: rows.jsonl}, max_prompt_tokens: 64}
environment: {name: 'boards.py:Boards', max_turns: 2, workers: 1}
rollout: {prompts: 2, n: 3, max_tokens: 5}
algorithm: {preset: grpo, kl: {loss: {coef: 0.01}}}
training: {steps: 2, mini_batches: 2, optimizer: {lr: 1.0e-3}}
run: {save_every: 1, samples_every: 1, threads: 1, name: run}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a tiny random Qwen2.5-VL."""
    found = tmp_path_factory.mktemp("pictures")
    tokenizer = seeing_tokenizer()
    ids = {name: tokenizer.encode(name)[0] for name in MARKS}
    text = TEXT | {
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": tokenizer.eos_ids[0],
        "num_hidden_layers": 2,
        "rope_parameters": SECTIONS,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=VISION | QWEN25,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    randomise(model)
    model.save_pretrained(found / "model")
    tokenizer.save(found / "model")
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 1024}
    (found / "model" / "preprocessor_config.json").write_text(json.dumps(sizes))
    rows = [
        {"prompt": "<image>Play.", "images": [ImageInput(scene(16, 24, seed)).data_url()], "answer": ""}
        for seed in range(4)
    ]
    (found / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found / "boards.py").write_text(BOARDS)
    (found / "recipe.yaml").write_text(RECIPE)
    return found


def trained(folder: Path, name: str) -> Path:
    loaded = load(TrainConfig, folder / "recipe.yaml", [f"run.directory={folder}", f"run.name={name}"])
    with checked_run(loaded.config, loaded.resolved, loaded.base, name) as (parts, run):
        assert execute(parts, run)
    return folder / name


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "checkpoints" / "step-000002" / "model.safetensors")


def test_a_run_that_sees_learns_from_the_pixels_that_it_sampled_with_and_resumes_from_its_journal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = trained(folder, "straight")
    for row in read_metrics(straight / "metrics.jsonl"):
        assert row["mismatch/max"] < 1e-4, "engine and learner see the same pixels"
    samples = read_samples(straight / "samples")
    assert len(samples) == 12
    for row in samples:
        assert len(row["pictures"]) == 2, "the scene and the board"
        assert row["prompt"].count("<image:") == 1
        assert json.loads(row["turns"])[1]["text"].count("<image:") == 1
        assert all(picture_file(straight / "samples", name).is_file() for name in row["pictures"])

    update, num_updates, asked = Learner.update, 0, list[int]()

    def fails_once(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 3:
            raise RuntimeError("the machine stopped")
        return update(self, *arguments, **options)

    submit = PagedEngine.submit

    def counted(self: Any, requests: Any) -> None:
        asked.append(len(requests))
        submit(self, requests)

    monkeypatch.setattr(Learner, "update", fails_once)
    with pytest.raises(RuntimeError, match="the machine stopped"):
        trained(folder, "stopped")
    monkeypatch.setattr(PagedEngine, "submit", counted)
    resumed = trained(folder, "stopped")
    assert asked == [], "the rollouts of step 2 come from the journal, images included"
    expected, found = weights(straight), weights(resumed)
    assert all((expected[name] == found[name]).all() for name in expected)
