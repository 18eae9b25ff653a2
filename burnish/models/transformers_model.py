"""Models of unsupported architectures, whose forward pass runs in transformers: slower than the native decoder.

Sequences are right-padded for the call, since transformers does not support packed batches for every architecture.
Log-probs come from its logits, so the memory of [tokens, vocab] is needed. Image-text models get the inputs that their own processor
makes of the pictures (`vision/transformers_processor.py`). Sequences whose inputs have different shapes run one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.core.batch import from_padded, to_padded
from burnish.core.pictures import Picture
from burnish.core.segments import offsets_from_lengths
from burnish.core.sharded_tensors import full_tensor, local_shard, local_tensor
from burnish.models.architecture import read_config
from burnish.models.kernels.shared_prefix import RowShard, UnshardedRows
from burnish.models.tokenizer import check_remote_code
from burnish.models.vision.transformers_processor import PixelInputs, Signature
from burnish.models.weight_files import gathering_stage, weight_files
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Checksums, Content, file_checksum, writer_rank_of
from burnish.run.checkpoint.tensor_file import TensorBytes

Pictures = Sequence[Sequence[Picture]]
"""The pictures of each sequence of a packing, in order."""


def _load_pretrained(directory: Path, dtype: torch.dtype) -> Any:
    """Load the transformers model of a directory with every weight checked; no code of it is run and no pickle is opened."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # type: ignore[attr-defined]  # mypy leaves out transformers.models

    weight_files(directory)
    reads_images = bool(read_config(directory).get("vision_config"))
    try:
        loaded: Any = (AutoModelForImageTextToText if reads_images else AutoModelForCausalLM).from_pretrained(
            str(directory),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below, with names
            output_loading_info=True,
        )
    except (ImportError, OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        check_remote_code(directory, error)
        raise UserError(f"transformers cannot load {directory}: {error}") from error
    inner, info = loaded
    # For both transformers would only warn and continue with random weights.
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise UserError(f"{directory}: {name} is {tuple(stored)} but config.json implies {tuple(wanted)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}")
    return inner


class TransformersPolicy(nn.Module):
    """A causal language model of transformers with the interface of the native decoder."""

    def __init__(self, inner: Any, pixel_inputs: PixelInputs | None = None) -> None:
        super().__init__()
        self.inner = inner.eval()  # no dropout: the learner's log-probs must be those of the sampling distribution
        self.pixel_inputs = pixel_inputs
        """Makes the model's inputs of pictures; None for a text model."""
        self.pictures: Pictures | None = None
        """The pictures of the next passes; set by `with_pictures`."""

    @staticmethod
    def load(directory: Path, dtype: torch.dtype, device: torch.device) -> TransformersPolicy:
        """Load a model from a local directory."""
        config = read_config(directory)
        inputs = PixelInputs(directory, config) if config.get("vision_config") else None
        policy = TransformersPolicy(_load_pretrained(directory, dtype), inputs)
        policy.to(device)
        return policy

    def load_weights(self, directory: Path) -> None:
        """Copy the weights of a saved directory in place; tensors keep their addresses.

        They are read through a second model: names and grouping of tensors in a file may differ from the module's, and
        only transformers can translate them.
        """
        own = self.inner.state_dict()
        read = _load_pretrained(directory, self.inner.dtype).state_dict()
        if own.keys() != read.keys():
            unexpected, missing = sorted(read.keys() - own.keys()), sorted(own.keys() - read.keys())
            raise UserError(f"{directory} does not fit the model: unexpected {unexpected[:3]}, missing {missing[:3]}")
        for name, tensor in own.items():
            if tensor.shape != read[name].shape:
                shapes = f"{tuple(read[name].shape)}, but the model has {tuple(tensor.shape)}"
                raise UserError(f"{directory} does not fit the model: {name} is {shapes}")
        with torch.no_grad():
            for name, tensor in own.items():
                shard = local_shard(tensor)
                block = tuple(
                    slice(start, start + size) for start, size in zip(shard.offsets, shard.sizes, strict=True)
                )
                local_tensor(tensor).copy_(read[name][block])

    def with_pictures(self, pictures: Pictures | None) -> AbstractContextManager[None]:
        """Set the pictures of the passes within, by sequence; None for text."""
        return _with_pictures(self, pictures)

    def token_logprobs(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        shared_prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs at the `wanted` positions, and entropies if requested. `shared_prefix` is ignored."""
        log_p = self._log_softmax(tokens, offsets, wanted, temperature)
        logp = log_p.gather(1, tokens[wanted][:, None]).squeeze(1)
        return logp, -(log_p.exp() * log_p).sum(-1) if with_entropy else None

    @torch.no_grad()
    def token_statistics(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        shared_prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities at the `wanted` positions, without gradient."""
        log_p = self._log_softmax(tokens, offsets, wanted, temperature)
        p = log_p.exp()
        return log_p.gather(1, tokens[wanted][:, None]).squeeze(1), -(p * log_p).sum(-1), p.square().sum(-1)

    def _log_softmax(self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float) -> Tensor:
        """Log-probs [M, vocab] of all tokens at the `wanted` positions, in float32 at least."""
        logits = _padded_forward(self, "logits", tokens, offsets)[wanted - 1]
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return (logits / temperature).log_softmax(-1)

    def contents(self, stage: TensorStaging) -> Content:
        """Weights and configs of a Hugging Face directory; of a sharded model, process 0 has all of it."""
        part = writer_rank_of(self)
        stage = gathering_stage(stage, part)
        staged: dict[int, TensorBytes] = {}  # by id, so that tied tensors are written once
        state: dict[str, TensorBytes] = {}
        for name, tensor in self.inner.state_dict(keep_vars=True).items():
            if id(tensor) not in staged:
                whole = full_tensor(tensor)
                staged[id(tensor)] = stage(whole if part.index == 0 else whole[:0])
            state[name] = staged[id(tensor)]
        return PretrainedFiles(self.inner, state)


@dataclass(frozen=True)
class PretrainedFiles:
    """A transformers model to be saved with the given weights. transformers chooses the names of its files."""

    inner: Any
    state: Mapping[str, TensorBytes]

    def write(self, folder: Path) -> Checksums:
        with TemporaryDirectory(dir=folder) as own:
            self.inner.save_pretrained(own, state_dict={name: staged.tensor for name, staged in self.state.items()})
            written = sorted(path for path in Path(own).rglob("*") if path.is_file())
            names = [str(path.relative_to(own)) for path in written]
            for path, name in zip(written, names, strict=True):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                path.rename(folder / name)
        return {name: file_checksum(folder / name) for name in names}


class TransformersBackbone(nn.Module):
    """A copy of a transformers model without its output head: hidden states with the interface of the native decoder."""

    def __init__(self, policy: TransformersPolicy) -> None:
        super().__init__()
        base = policy.inner.base_model
        if base is policy.inner:
            name = type(policy.inner).__name__
            raise UserError(
                f"{name} of transformers has no model below its output head, so no critic can be made of it"
            )
        self.inner = copy.deepcopy(base).eval()
        self.pixel_inputs = policy.pixel_inputs
        self.pictures: Pictures | None = None
        """The pictures of the next passes; set by `with_pictures`."""

    def with_pictures(self, pictures: Pictures | None) -> AbstractContextManager[None]:
        """Set the pictures of the passes within, by sequence; None for text."""
        return _with_pictures(self, pictures)

    def states(
        self, tokens: Tensor, offsets: Tensor, at: Tensor, shared_prefix: Tensor | None = None
    ) -> tuple[Tensor, RowShard]:
        """Final hidden states of the tokens `at` of packed sequences. `shared_prefix` is ignored, and rows are not sharded."""
        hidden = _padded_forward(self, "last_hidden_state", tokens, offsets)
        return hidden[at], UnshardedRows(at)


@contextmanager
def _with_pictures(model: TransformersPolicy | TransformersBackbone, pictures: Pictures | None) -> Iterator[None]:
    before, model.pictures = model.pictures, pictures
    try:
        yield
    finally:
        model.pictures = before


def _padded_forward(
    model: TransformersPolicy | TransformersBackbone, output: str, tokens: Tensor, offsets: Tensor
) -> Tensor:
    """An output [N, ...] of a transformers model on packed sequences, right-padded, with the model's pictures."""
    pictures = model.pictures
    if pictures is None or not any(pictures):
        found = _padded_output(model.inner, output, tokens, offsets, {})
        return from_padded(found, offsets.diff())[0]
    inputs = model.pixel_inputs
    if inputs is None:
        raise UserError(f"{type(model.inner).__name__} reads text only, but the batch has images")
    groups: dict[Signature, list[int]] = {}
    for index, own in enumerate(pictures):
        groups.setdefault(inputs.signature(own), []).append(index)
    lengths, parts, order = offsets.diff(), [], []
    for members in groups.values():
        chosen = lengths[torch.tensor(members, device=offsets.device)]
        starts = offsets_from_lengths(chosen)
        elements = torch.cat(
            [torch.arange(int(offsets[i]), int(offsets[i + 1]), device=offsets.device) for i in members]
        )
        some = tokens[elements]
        extra = inputs.joined([pictures[i] for i in members], to_padded(some, starts), model.inner.dtype)
        parts.append(from_padded(_padded_output(model.inner, output, some, starts, extra), chosen)[0])
        order.append(elements)
    return torch.cat(parts)[torch.cat(order).argsort()]


def _padded_output(inner: Any, output: str, tokens: Tensor, offsets: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    """An output [S, longest, ...] of packed sequences, right-padded."""
    padded = to_padded(tokens, offsets)
    real = torch.arange(padded.shape[1], device=tokens.device) < offsets.diff()[:, None]
    found: Tensor = getattr(inner(input_ids=padded, attention_mask=real.long(), use_cache=False, **extra), output)
    return found
