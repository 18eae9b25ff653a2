"""Tiny recipes, plug-ins and models for the tests of `burnish train`, and helpers that run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.models.tokenizer import Tokenizer
from burnish.run.metrics import parse_line

RECIPE = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
data: {train: {task: sort_digits}, max_prompt_tokens: 16}
reward: {parts: {name: 'plug.py:count_zeros'}, workers: 1}
rollout: {prompts: 3, n: 4, max_tokens: 6}
algorithm: dr_grpo
training: {steps: 2, optimizer: {lr: 1.0e-3}}
run: {threads: 1, directory: runs, name: r}
"""
FROM_FILES = """
model: {path: model, device: cpu}
data: {train: {path: sums.jsonl}, validation: {path: sums.jsonl}, max_prompt_tokens: 16}
reward: {parts: number, workers: 1}
rollout: {prompts: 4, n: 4, max_tokens: 4}
training: {steps: 2, optimizer: {lr: 1.0e-2}}
run: {threads: 1, directory: runs, name: r}
"""
PLUGINS = """
import os, signal
from pathlib import Path

def count_zeros(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("0") + 0.1 * len(solution_str)

def fails_on_short(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) < 6:
        raise ValueError("too short to be scored")
    return float(solution_str.count("0"))

def always_fails(data_source, solution_str, ground_truth, extra_info):
    raise ValueError("never works")

def breaks(data_source, solution_str, ground_truth, extra_info):
    count = Path(__file__).with_name("count")
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
    if number >= 24 and Path(__file__).with_name("broken").exists():
        raise ValueError("broken from step 3 on")
    return len(solution_str) / 10

def exits(batch):
    raise SystemExit(0)

def constant(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def rows(count):
    return [{"prompt": f"{i}>", "answer": str(i)} for i in range(count)]

def no_rows():
    return 5

def backwards(size, seed, epoch):
    return reversed(range(size))

def half(batch, scale):
    return scale * (batch.sequence["reward"] - batch.sequence["reward"].mean())

def a_list(batch):
    return [0.0] * batch.num_sequences

def squared(logp, anchor, advantages):
    return -advantages * (logp - anchor).exp() ** 2

def first_only(batch):
    return batch.sequence["reward"].new_ones(batch.num_sequences).cumsum(0) == 1

def a_number(batch):
    return 3

def signalled(batch):
    flag = Path(__file__).with_name("flag")
    if flag.exists():
        number = int(flag.read_text())
        flag.unlink()
        os.kill(os.getpid(), number)
    return batch.sequence["reward"] - batch.sequence["reward"].mean()
"""
ENVIRONMENTS = """
from burnish.environments.base import Done, Turn

class Twice:
    def __init__(self, prompt, tokenizer, goal):
        self.prompt, self.again, self.goal = prompt, tuple(tokenizer.encode(">")), goal
        self.turns = 0
    def start(self):
        return Turn(tuple(self.prompt.tokens))
    def observe(self, completion, text):
        self.turns += 1
        return Done(float(len(text) - self.goal)) if self.turns == 2 else Turn(self.again)

class Forgetful(Twice):
    def observe(self, completion, text):
        return None

class Babble(Twice):
    def start(self):
        return Turn((1, 9999))
"""


def make_model(path: Path, vocab_size: int = 16, kind: str = "llama") -> Path:
    """A tiny Hugging Face directory with a character tokenizer of 16 tokens."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = tf.LlamaConfig(vocab_size=vocab_size, max_position_embeddings=32, **sizes, **ends)
        inner = tf.LlamaForCausalLM(config)
    else:
        config = tf.GPT2Config(vocab_size=vocab_size, n_positions=32, n_embd=16, n_layer=1, n_head=2, **ends)
        inner = tf.GPT2LMHeadModel(config)
    inner.save_pretrained(path)
    Tokenizer.from_characters("0123456789>+= ").save(path)
    return path


def train(recipe: str, *overrides: str) -> int:
    return main(["train", recipe, *overrides])


def metrics() -> list[dict]:
    """Every line of metrics.jsonl; each is strict JSON."""
    lines = Path("runs/r/metrics.jsonl").read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return [parse_line(line) for line in lines]


def refused(capsys: pytest.CaptureFixture[str], recipe: str, *overrides: str) -> str:
    """The message of a command that must fail, and leave nothing of a run behind."""
    assert train(recipe, *overrides) == 2
    message = capsys.readouterr().err
    assert message.startswith("burnish: error: ")
    assert not Path("runs/r").exists()
    return message


def weights(run: str) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    last = max(Path(run, "checkpoints").glob("step-*"))
    return {name: array.tobytes() for name, array in load_file(last / "model.safetensors").items()}
