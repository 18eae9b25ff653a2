"""A small model that sorts digits, with an ambiguous tokenizer. Its runs take half a second."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from burnish.config.model import NewModel
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from tests.trainers.tiny import run_of

SORTING = """
data: {train: {task: sort_digits, options: {min_digits: 2, max_digits: 4}}, max_prompt_tokens: 16}
rollout: {prompts: 16, n: 8, max_tokens: 8}
reward: {workers: 1}
training: {steps: 6, optimizer: {lr: 3.0e-4}}
algorithm: {kl: {loss: {coef: 0}, reference: none}}
run: {samples_every: 100, save_every: 100}
"""
WARM = """
warm_start:
  data: {task: sort_digits, options: {num: 2000, clean: true, min_digits: 2, max_digits: 4}}
  updates: 150
  batch_size: 64
  optimizer: {lr: 1.0e-2, betas: [0.9, 0.95], warmup: 10, schedule: linear, final: 0.1}
"""


def spelling() -> Tokenizer:
    """Digits and some pairs of them: a text has several spellings, and re-encoding it gives the one without loose pairs."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    pairs = [f"{a}{b}" for a in range(10) for b in range(a, 10) if (a + b) % 3 == 0]
    words = ["<pad>", "<eos>", *"0123456789>", *pairs]
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, [(p[0], p[1]) for p in pairs]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"))


def make_sorter(folder: Path) -> Path:
    """The directory of a model that mostly knows how to sort: sure of most tokens, undecided at some, as a trained one is."""
    tokenizer = spelling()
    new = NewModel(hidden_size=32, num_layers=2, num_heads=2, mlp_size=64, max_positions=64)
    module = Decoder(new_architecture(new, tokenizer.vocab_size))
    initialise(module, 0)
    (folder / "new").mkdir()
    PolicyModel(module, tokenizer, None, "").save(folder / "new")
    text = f"model: {{path: {folder / 'new'}}}\n{SORTING}{WARM}"
    return run_of(folder / "run", text, ["training.steps=1", "rollout.prompts=1"]) / "warm_start"


def with_outliers(sorter: Path, folder: Path) -> Path:
    """The same function with a channel of large weights, as large models grow them: what int8 takes its step from."""
    for file in sorter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for layer in range(2):
        for norm, matrices in readers.items():
            tensors[f"model.layers.{layer}.{norm}.weight"][3] /= 64
            for matrix in matrices:
                tensors[f"model.layers.{layer}.{matrix}.weight"][:, 3] *= 64
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
