"""Real checkpoints load, generate what transformers does, and train: those that are here.

The small fixture model lies with the shared data; others are named by `BURNISH_MODELS`, directories divided by colons.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from burnish.cli import main as cli
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import load_decoder

FIXTURE = Path(__file__).parents[2] / "../shared/data/models/stories260k"
NAMED = [Path(text) for text in os.environ.get("BURNISH_MODELS", "").split(":") if text]
MODELS = [pytest.param(FIXTURE, marks=pytest.mark.skipif(not FIXTURE.is_dir(), reason="the fixture model is not here"))]
MODELS += [pytest.param(path, marks=pytest.mark.slow) for path in NAMED]
TEXT = "Once upon a time there was a"
REWARD = """
def letters(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("e") / 10
"""
RECIPE = """
model: {{path: {model}, dtype: float32, device: cpu}}
data: {{train: {{path: rows.jsonl}}}}
reward: {{parts: reward.py:letters, workers: 1}}
rollout: {{prompts: 2, n: 4, max_tokens: 16}}
algorithm: grpo
training: {{steps: 1, optimizer: {{lr: 1.0e-4}}}}
run: {{directory: runs, name: once, save_every: 1}}
"""


@pytest.mark.parametrize("directory", MODELS, ids=lambda path: path.name)
def test_a_real_model_generates_what_transformers_does(directory: Path) -> None:
    model, tokenizer = load_decoder(directory, torch.float32, torch.device("cpu")), Tokenizer.load(directory)
    prompt = tuple(tokenizer.encode(TEXT, special=True))
    request = Request("a", prompt, SamplingOptions(max_tokens=12, temperature=0.0), 0)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for engine in (DenseEngine(model), PagedEngine(model, max_rows=1)):
        engine.submit([request])
        (done,) = engine.stream()
        whole = torch.tensor([[*prompt, *done.tokens.tolist()]])
        with torch.no_grad():
            logits = theirs(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == done.tokens.tolist()
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.from_numpy(done.logp), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("directory", MODELS, ids=lambda path: path.name)
def test_a_real_model_takes_a_step_that_transformers_can_load(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(REWARD)
    Path("rows.jsonl").write_text('{"prompt": "Tell me a story of a bear."}\n{"prompt": "Where is the dog?"}\n')
    Path("recipe.yaml").write_text(RECIPE.format(model=directory.resolve()))
    assert cli.main(["train", "recipe.yaml"]) == 0
    trained = AutoModelForCausalLM.from_pretrained("runs/once/checkpoints/step-000001", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    changes = [
        float((a - b).detach().abs().max()) for a, b in zip(trained.parameters(), before.parameters(), strict=True)
    ]
    assert (
        0 < max(changes) < 1e-2
    )  # one step of Adam: at most about the learning rate, and the rounding of a checkpoint
