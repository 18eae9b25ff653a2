"""A policy ready to train and to sample: the module, its tokenizer, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from burnish.config.errors import UserError
from burnish.config.schema import Model
from burnish.models.architecture import from_nothing, read_config, why_not_native
from burnish.models.decoder import Decoder, initialise
from burnish.models.hf import TransformersPolicy
from burnish.models.tokenizer import Tokenizer
from burnish.models.weights import fill, load_decoder, save_decoder, stored_tensors


@dataclass
class PolicyModel:
    """`module` is our decoder, or transformers' model behind the same interface; `note` says which and why."""

    module: Decoder | TransformersPolicy
    tokenizer: Tokenizer
    source: Path | None
    note: str

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model is made for; None where its config does not say."""
        if isinstance(self.module, Decoder):
            return self.module.arch.max_positions
        return getattr(self.module.inner.config.get_text_config(), "max_position_embeddings", None)

    def save(self, directory: Path) -> None:
        """Weights, configs and tokenizer as a Hugging Face directory."""
        if isinstance(self.module, Decoder):
            save_decoder(self.module, directory, self.source, self.tokenizer.eos_ids, self.tokenizer.pad_id)
        else:
            self.module.save(directory)
        self.tokenizer.save(directory)

    def load_weights(self, directory: Path) -> None:
        """Copy the weights of a saved directory into the module in place; tensors keep their addresses."""
        if isinstance(self.module, Decoder):
            fill(self.module, stored_tensors(directory), str(directory))
        else:
            self.module.load_weights(directory)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device={name!r} is not a device: use auto, cpu, cuda or cuda:<number>") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"model.device={name!r}: use auto, cpu, cuda or cuda:<number>")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"model.device={name!r} but torch sees no GPU here; `burnish doctor` says what is missing")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"model.device={name!r} but torch sees only {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def load_policy(config: Model, path: Path | None, alphabet: str | None, seed: int) -> PolicyModel:
    """The policy of a config: from `path` if given (the resolved model directory), else `model.new` from nothing."""
    dtype, device = getattr(torch, config.dtype), pick_device(config.device)
    if path is None:
        return _new(config, alphabet, seed, dtype, device)
    reason = why_not_native(read_config(path))
    if config.backend == "native" and reason:
        raise UserError(f"model.backend=native, but {path} cannot run on it: {reason}")
    if config.backend == "transformers" or reason:
        note = f"forward by transformers, slower than the native decoder ({reason or 'model.backend=transformers'})"
        other = TransformersPolicy.load(path, dtype, device)
        return PolicyModel(other, _tokenizer(path, other.inner.get_input_embeddings().num_embeddings), path, note)
    module = load_decoder(path, dtype, device)
    tokenizer = _tokenizer(path, module.arch.vocab_size)
    return PolicyModel(module, tokenizer, path, f"native decoder, {module.arch.num_parameters:,} parameters")


def _tokenizer(path: Path, num_embeddings: int) -> Tokenizer:
    """The directory's tokenizer, if the model has an embedding for each of its tokens; a spare embedding does no harm."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.vocab_size > num_embeddings:
        raise UserError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has embeddings for {num_embeddings} only; "
            "are the tokenizer files those of another model?"
        )
    return tokenizer


def _new(config: Model, alphabet: str | None, seed: int, dtype: torch.dtype, device: torch.device) -> PolicyModel:
    if config.new is None:
        raise UserError("no model: give model.path (a Hugging Face directory) or model.new (from nothing)")
    if config.backend == "transformers":
        raise UserError("model.new makes a native decoder; model.backend=transformers needs a model.path")
    if alphabet is None:
        raise UserError(
            "model.new needs a task that names its characters (sort_digits, addition, countdown); give model.path for other data"
        )
    tokenizer = Tokenizer.from_characters(alphabet)
    module = Decoder(from_nothing(config.new, tokenizer.vocab_size))
    initialise(module, seed)
    module.to(device=device, dtype=dtype)
    return PolicyModel(
        module, tokenizer, None, f"new {config.new.family} decoder, {module.arch.num_parameters:,} parameters"
    )
