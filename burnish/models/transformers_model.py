"""Any other architecture: transformers does the forward. Slower than our decoder, and correct.

Sequences are right-padded for the call (transformers knows no packed batches for every architecture); log-probs come
from its logits, so the memory of [tokens, vocab] is paid here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.core.batch import from_padded, to_padded
from burnish.core.sharded_tensors import full_tensor, local_shard, local_tensor
from burnish.models.kernels.shared_prefix import RowShard, SharedPrefixes, UnshardedRows
from burnish.models.tokenizer import check_remote_code
from burnish.models.weight_files import weight_files
from burnish.run.checkpoint.saver import HostCopy, TensorStaging
from burnish.run.checkpoint.snapshot import Checksums, Content, TensorBytes, file_checksum, writer_rank_of


def _load_pretrained(directory: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a directory, every weight in place; no code from it is run, no pickle is opened."""
    from transformers import AutoModelForCausalLM  # type: ignore[attr-defined]  # mypy leaves out transformers.models

    weight_files(directory)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below, with names
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        check_remote_code(directory, error)
        raise UserError(f"transformers cannot load {directory}: {error}") from error
    inner, info = loaded
    # Of both, transformers would only warn and go on with random numbers in their place.
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise UserError(f"{directory}: {name} is {tuple(stored)} but config.json implies {tuple(wanted)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}")
    return inner


class TransformersPolicy(nn.Module):
    """A causal language model of transformers behind the interface of our decoder."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner.eval()  # no dropout: the log-probs trained on must be those sampled from

    @staticmethod
    def load(directory: Path, dtype: torch.dtype, device: torch.device) -> TransformersPolicy:
        """From a local directory."""
        policy = TransformersPolicy(_load_pretrained(directory, dtype))
        policy.to(device)
        return policy

    def load_weights(self, directory: Path) -> None:
        """Copy the weights of a saved directory in place; tensors keep their addresses.

        They are read by way of a second model: the names and the grouping of tensors in a file are not always
        those of the module, and only transformers knows how to translate them.
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
                held = local_shard(tensor)
                block = tuple(slice(start, start + size) for start, size in zip(held.offsets, held.sizes, strict=True))
                local_tensor(tensor).copy_(read[name][block])

    def token_logprobs(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        shared_prefix: SharedPrefixes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token given its past) at the `wanted` positions, and entropies if asked; beginnings are not shared here."""
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
        shared_prefix: SharedPrefixes | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities at the `wanted` positions, without gradient."""
        log_p = self._log_softmax(tokens, offsets, wanted, temperature)
        p = log_p.exp()
        return log_p.gather(1, tokens[wanted][:, None]).squeeze(1), -(p * log_p).sum(-1), p.square().sum(-1)

    def _log_softmax(self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float) -> Tensor:
        """[M, vocab] over what may stand at the `wanted` positions, in float32 at least."""
        logits = _padded_forward(self.inner, tokens, offsets).logits
        logits = from_padded(logits, offsets.diff())[0][wanted - 1]
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return (logits / temperature).log_softmax(-1)

    def contents(self, stage: TensorStaging) -> Content:
        """A Hugging Face directory (weights and configs); of a model that is spread over processes the first's is whole."""
        part = writer_rank_of(self.parameters())
        if part.count > 1 and not isinstance(stage, HostCopy):
            stage = HostCopy()  # what is gathered is gone when the next tensor is
        held: dict[int, TensorBytes] = {}  # tied tensors stay one, or both would be written
        state: dict[str, TensorBytes] = {}
        for name, tensor in self.inner.state_dict(keep_vars=True).items():
            if id(tensor) not in held:
                whole = full_tensor(tensor)
                held[id(tensor)] = stage(whole if part.index == 0 else whole[:0])
            state[name] = held[id(tensor)]
        return PretrainedFiles(self.inner, state)


@dataclass(frozen=True)
class PretrainedFiles:
    """A model of transformers to be saved, with the weights it had: only transformers knows the names of its files."""

    inner: Any
    state: Mapping[str, TensorBytes]

    def write(self, folder: Path) -> Checksums:
        with TemporaryDirectory(dir=folder) as own:
            self.inner.save_pretrained(own, state_dict={name: held.tensor for name, held in self.state.items()})
            written = sorted(path for path in Path(own).rglob("*") if path.is_file())
            names = [str(path.relative_to(own)) for path in written]
            for path, name in zip(written, names, strict=True):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                path.rename(folder / name)
        return {name: file_checksum(folder / name) for name in names}


class TransformersBackbone(nn.Module):
    """A copy of such a model without its output head: hidden states behind the interface of our decoder."""

    def __init__(self, policy: TransformersPolicy) -> None:
        super().__init__()
        base = policy.inner.base_model
        if base is policy.inner:
            name = type(policy.inner).__name__
            raise UserError(
                f"{name} of transformers has no model below its output head, so no critic can be made of it"
            )
        self.inner = copy.deepcopy(base).eval()

    def states(
        self, tokens: Tensor, offsets: Tensor, at: Tensor, shared_prefix: SharedPrefixes | None = None
    ) -> tuple[Tensor, RowShard]:
        """Final hidden states of the tokens `at` of packed sequences; beginnings are not shared here, nor is work divided."""
        hidden = from_padded(_padded_forward(self.inner, tokens, offsets).last_hidden_state, offsets.diff())[0]
        return hidden[at], UnshardedRows(at)


def _padded_forward(inner: Any, tokens: Tensor, offsets: Tensor) -> Any:
    """A model of transformers on packed sequences, right-padded for it."""
    padded = to_padded(tokens, offsets)
    real = torch.arange(padded.shape[1], device=tokens.device) < offsets.diff()[:, None]
    return inner(input_ids=padded, attention_mask=real.long(), use_cache=False)
