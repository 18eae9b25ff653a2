"""Load and save policies: the module, its tokenizer and its source directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.model import Lora, Model, NewModel, Vision
from burnish.config.model_ids import model_directory
from burnish.core.sharded_tensors import full_tensor
from burnish.models.architecture import (
    Architecture,
    architecture_from_hf,
    new_architecture,
    read_config,
    why_not_native,
)
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels.cpu.c_library import prepare_c_kernels
from burnish.models.lora.adapters import add_lora, merged_tensors, wrap_with_lora
from burnish.models.lora.peft_files import (
    adapter_contents,
    base_model_of,
    describe_lora,
    is_adapter,
    load_adapter,
    read_lora_config,
)
from burnish.models.model_families import FAMILIES
from burnish.models.tokenizer import Tokenizer
from burnish.models.transformers_model import TransformersPolicy
from burnish.models.vision.processor_files import kept_processor_files
from burnish.models.vision.qwen_shape import QwenVisionShape
from burnish.models.weight_files import (
    decoder_contents,
    defer_decoder,
    load_decoder,
    load_tensors,
    save_decoder,
    stored_tensors,
)
from burnish.models.weight_layout import num_lora_parameters
from burnish.run.checkpoint.saver import TensorStaging, keep_in_place
from burnish.run.checkpoint.snapshot import Content, WriterRank, write_contents, writer_rank_of


@dataclass(frozen=True)
class PolicyOutline:
    """A policy as its config and directory describe it, without loading or creating weights."""

    tokenizer: Tokenizer
    max_positions: int | None
    """The longest sequence that the model supports; None if its config does not say."""
    arch: Architecture | None
    """The architecture of the native decoder; None if the model runs through transformers."""
    source: Path | None = None
    """The model directory (the base's, for an adapter); None for a new model."""
    adapter: Path | None = None
    reason: str = ""
    """Why the model runs through transformers; empty if it does not."""


@dataclass
class PolicyModel:
    """A loaded policy: the native decoder, or a transformers model with the same interface. `note` says which and why."""

    module: Decoder | TransformersPolicy
    tokenizer: Tokenizer
    source: Path | None
    note: str

    @property
    def arch(self) -> Architecture | None:
        """The architecture of the native decoder; None if the model runs through transformers."""
        return self.module.arch if isinstance(self.module, Decoder) else None

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model supports; None if its config does not say."""
        if isinstance(self.module, Decoder):
            return self.module.arch.max_positions
        return getattr(self.module.inner.config.get_text_config(), "max_position_embeddings", None)

    @property
    def lora(self) -> Lora | None:
        """The config of the adapters, which alone are trained, saved and loaded; None without adapters."""
        return self.module.lora if isinstance(self.module, Decoder) else None

    @property
    def is_plain_below(self) -> bool:
        """Whether the base weights are exactly those of the model's directory; quantised to 4 bits they are not."""
        return self.lora is None or self.lora.base == "dtype"

    def save(self, directory: Path) -> None:
        """Write a Hugging Face directory with weights, configs and tokenizer; with adapters, a PEFT directory."""
        write_contents(directory, self.contents(keep_in_place))

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The files of `save` as contents; of a sharded model, those that this process writes."""
        tokenizer, is_first = self.tokenizer, self.part.index == 0
        if isinstance(self.module, Decoder) and self.module.lora is None:
            each = decoder_contents(self.module, stage, self.source, tokenizer.eos_ids, tokenizer.pad_id)
            return [*each, *(tokenizer.contents() if is_first else ())]
        if isinstance(self.module, Decoder):
            whole = adapter_contents(self.module, stage, self.source)
        else:
            whole = [self.module.contents(stage)]
            if self.module.pixel_inputs is not None:
                whole += kept_processor_files(self.module.pixel_inputs.directory)
        return [*whole, *tokenizer.contents()] if is_first else []

    @property
    def part(self) -> WriterRank:
        """This process's rank among those that hold the model."""
        return writer_rank_of(self.module)

    def load_weights(self, directory: Path) -> None:
        """Copy the weights of a saved directory into the module in place; tensors keep their addresses."""
        if isinstance(self.module, Decoder) and self.module.lora is not None:
            load_adapter(self.module, directory)
        elif isinstance(self.module, Decoder) and self.module.unloaded_from is not None:
            self.module.unloaded_from = directory
        elif isinstance(self.module, Decoder):
            load_tensors(self.module, stored_tensors(directory), str(directory))
        else:
            self.module.load_weights(directory)


AnyPolicy = PolicyModel | PolicyOutline
"""A policy with or without its weights, for checks of tokens and lengths."""


def full_hf_tensors(policy: PolicyModel, wide: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face's names with adapters merged, as other engines load them.

    If `wide`, merged weights are in float32.
    """
    if isinstance(policy.module, Decoder):
        yield from merged_tensors(policy.module, wide)
        return
    seen: set[int] = set()
    for name, tensor in policy.module.inner.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:  # a tied tensor has two names, but is stored once
            seen.add(id(tensor))
            yield name, full_tensor(tensor)


def save_merged(policy: PolicyModel, directory: Path) -> None:
    """Write a Hugging Face directory of a model with its adapters merged into the weights."""
    assert isinstance(policy.module, Decoder), "only the native decoder has adapters"
    eos_ids, pad_id = policy.tokenizer.eos_ids, policy.tokenizer.pad_id
    save_decoder(policy.module, directory, policy.source, eos_ids, pad_id, merged_tensors(policy.module))
    policy.tokenizer.save(directory)


@torch.no_grad()
def check_finite(policy: PolicyModel, tokens: Sequence[int] = ()) -> None:
    """Raise if a model's log-probs after these tokens are NaN, since every sampled token would be noise."""
    end = policy.tokenizer.pad_id
    probe = torch.tensor([*(tokens or [end]), end], device=next(policy.module.parameters()).device)
    offsets = torch.tensor([0, len(probe)], device=probe.device)
    logp = policy.module.token_logprobs(probe, offsets, torch.tensor([len(probe) - 1], device=probe.device))[0]
    if not torch.isnan(logp).any():  # -inf is fine: a token of probability 0
        return
    named = policy.module.named_parameters()
    broken = next((name for name, tensor in named if tensor.is_floating_point() and not tensor.isfinite().all()), None)
    why = (
        f"its tensor {broken} holds values that are not finite; take an earlier checkpoint"
        if broken is not None
        else "its weights are finite, so the arithmetic overflows; take another dtype (bfloat16 or float32)"
    )
    raise UserError(f"{policy.source or 'the model'} gives no probabilities (NaN): {why}")


def resolve_device(name: str) -> torch.device:
    """The torch device of `model.device`; `auto` is the GPU if there is one. Raise if the device does not exist."""
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


def outline_policy(
    config: Model, path: Path | None, alphabet: str | None, adapter: Path | None = None
) -> PolicyOutline:
    """The outline of a config's policy; raise if it cannot be loaded. The arguments are those of `load_policy`."""
    path, adapter = _base_and_adapter(path, adapter)
    if path is None:
        return _outline_new(config, alphabet)
    hf_config = read_config(path)
    reason = why_not_native(hf_config)
    if config.backend == "native" and reason:
        raise UserError(f"model.backend=native, but {path} cannot run on it: {reason}")
    if config.backend == "transformers" or reason:
        why = reason or "model.backend=transformers"
        if config.lora is not None or adapter is not None:
            raise UserError(f"adapters need the native decoder, and {path} runs through transformers ({why})")
        positions = hf_config.get("text_config", hf_config).get("max_position_embeddings")
        return PolicyOutline(_load_tokenizer(config, path), positions, None, path, None, why)
    arch = architecture_from_hf(hf_config, str(path / "config.json"))
    tokenizer = _load_tokenizer(config, path)
    _check_embeddings(tokenizer, arch.vocab_size, path)
    return PolicyOutline(tokenizer, arch.max_positions, arch, path, adapter)


def _base_and_adapter(path: Path | None, adapter: Path | None) -> tuple[Path | None, Path | None]:
    """The directory of a policy's weights and that of its adapters."""
    if adapter is None and path is not None and is_adapter(path):
        return base_model_of(path), path
    if adapter is not None and path is None:
        return base_model_of(adapter), adapter
    return path, adapter


def load_policy(
    config: Model,
    path: Path | None,
    alphabet: str | None,
    seed: int,
    adapter: Path | None = None,
    may_defer: bool = False,
) -> PolicyModel:
    """Load the policy of a config from `path`, the resolved model directory, or create `model.new` if there is no path.

    `adapter`, or a `path` that is a PEFT directory, gives it those adapters; `model.lora` gives it new ones. With `may_defer`, the weights of
    a native decoder are read after it has been divided over processes (`weight_files.load_deferred`).
    """
    dtype, device = getattr(torch, config.dtype), resolve_device(config.device)
    with ThreadPoolExecutor(2, "load") as threads:
        kernels = threads.submit(prepare_c_kernels, dtype) if device.type == "cpu" else None
        outline, module = _read_model(config, path, alphabet, adapter, may_defer, threads)
        if kernels is not None:
            kernels.result()
    tokenizer, source = outline.tokenizer, outline.source
    if source is None:
        assert outline.arch is not None, "a new model is a native decoder"
        module = Decoder(outline.arch)
        initialise(module, seed)
        module.to(device=device, dtype=dtype)
        choose_trained_vision(module, config.vision or "trained")
        note = f"new {outline.arch.family} decoder, {outline.arch.num_parameters:,} parameters"
        return PolicyModel(module, tokenizer, None, note)
    if module is None:
        note = f"forward by transformers, slower than the native decoder ({outline.reason})"
        other = TransformersPolicy.load(source, dtype, device)
        _check_embeddings(tokenizer, other.inner.get_input_embeddings().num_embeddings, source)
        return PolicyModel(other, tokenizer, source, note)
    lora = config.lora if outline.adapter is None else read_lora_config(outline.adapter)
    note = (
        f"native decoder, {module.arch.num_parameters:,} parameters{_add_adapters(module, lora, outline.adapter, seed)}"
    )
    choose_trained_vision(module, config.vision or "frozen")
    return PolicyModel(module, tokenizer, source, note)


def _read_model(
    config: Model,
    path: Path | None,
    alphabet: str | None,
    adapter: Path | None,
    may_defer: bool,
    threads: ThreadPoolExecutor,
) -> tuple[PolicyOutline, Decoder | None]:
    """The outline of a policy, and its native decoder if it has one in a directory.

    A thread reads the weights, and makes the context of a GPU for them, while this one imports the tokenizer's library and reads its
    files. Errors of config and tokenizer are raised before those of the weights.
    """
    source, adapter = _base_and_adapter(path, adapter)
    if source is None or config.backend == "transformers" or why_not_native(read_config(source)):
        return outline_policy(config, source, alphabet, adapter), None
    dtype, device = getattr(torch, config.dtype), resolve_device(config.device)
    lora = config.lora if adapter is None else read_lora_config(adapter)
    quantised = "dtype" if lora is None else lora.base
    if may_defer:
        return outline_policy(config, source, alphabet, adapter), defer_decoder(source, dtype, quantised)
    weights = threads.submit(load_decoder, source, dtype, device, quantised)
    outline = outline_policy(config, source, alphabet, adapter)
    return outline, weights.result()


def _add_adapters(module: Decoder, lora: Lora | None, adapter: Path | None, seed: int) -> str:
    """Add the adapters of a directory, new ones, or none; returns the text about them for the policy's note."""
    if lora is None:
        return ""
    if adapter is not None:
        wrap_with_lora(module, lora)
        load_adapter(module, adapter)
    else:
        add_lora(module, lora, seed)
    source_text = f" from {adapter}" if adapter is not None else ""
    return f", {describe_lora(lora)}{source_text} ({num_lora_parameters(module.arch, lora):,} parameters)"


def _load_tokenizer(config: Model, path: Path) -> Tokenizer:
    """The tokenizer of a directory, with the image processor of a model that sees."""
    tokenizer = Tokenizer.load(path, config.image_pixels)
    unused = [key for key in ("vision", "image_pixels") if getattr(config, key) is not None]
    if tokenizer.image_processor is None and unused:
        raise UserError(f"model.{unused[0]} has no effect: {path} is a model that reads text only")
    return tokenizer


def choose_trained_vision(module: Decoder | TransformersPolicy, vision: Vision) -> None:
    """Freeze the vision tower, train only its projector, or train all of it; the decoder stays as it is."""
    tower = module.vision if isinstance(module, Decoder) else None
    if tower is None:
        return
    tower.requires_grad_(vision == "trained")
    tower.projector.requires_grad_(vision != "frozen")


def _check_embeddings(tokenizer: Tokenizer, num_embeddings: int, path: Path) -> None:
    """Raise if the tokenizer has more tokens than the model has embeddings; more embeddings than tokens are fine."""
    if tokenizer.vocab_size > num_embeddings:
        raise UserError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has embeddings for {num_embeddings} only; "
            "are the tokenizer files those of another model?"
        )


def _outline_new(config: Model, alphabet: str | None) -> PolicyOutline:
    if config.new is None:
        raise UserError("no model: give model.path (a Hugging Face directory) or model.new (from nothing)")
    if config.backend == "transformers":
        raise UserError("model.new makes a native decoder; model.backend=transformers needs a model.path")
    if alphabet is None:
        raise UserError(
            "model.new needs a task with a known alphabet (sort_digits, addition, countdown); give model.path for other data"
        )
    if FAMILIES[config.new.family].vision_names is not None:
        return _outline_new_vision(config, config.new, alphabet)
    unused = [key for key in ("vision", "image_pixels") if getattr(config, key) is not None]
    if unused:
        raise UserError(f"model.{unused[0]} has no effect: a new model of family {config.new.family} reads text only")
    tokenizer = Tokenizer.from_characters(alphabet)
    arch = new_architecture(config.new, tokenizer.vocab_size)
    return PolicyOutline(tokenizer, arch.max_positions, arch)


def _outline_new_vision(config: Model, new: NewModel, alphabet: str) -> PolicyOutline:
    """A new model that sees: its tokenizer has the tokens, the template and the processor of images."""
    from burnish.models.vision import new_models

    marks, template = new_models.VISION_TOKENS, new_models.CHAT_TEMPLATE
    tokenizer = Tokenizer.from_characters(alphabet, marks, template, new_models.processor_files())
    arch = new_architecture(new, tokenizer.vocab_size)
    assert isinstance(arch.vision, QwenVisionShape)
    tokenizer.image_processor = new_models.new_processor(arch.vision, tokenizer.encode, config.image_pixels)
    return PolicyOutline(tokenizer, arch.max_positions, arch)


def find_directory(path: str, base: Path | None, with_weights: bool = True) -> Path:
    """Find a model directory, relative to the recipe's folder or the working directory, or the model of a hub id.

    Without `with_weights`, only the small files of an id are downloaded, which checks and plans read.
    """
    found = model_directory(path, base, with_weights)
    if found is None:
        looked = path if base is None else f"{base / path}, {path}"
        raise UserError(f"model directory {path} does not exist (looked at {looked})")
    return found
