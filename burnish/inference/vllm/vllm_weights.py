"""How named tensors become the weights of vLLM: whole models, and adapters.

A whole model goes through `reload_weights`, vLLM's own way for a trainer: it knows which tensors it keeps joined, packed or
padded. It says nothing of a tensor that is missing, whose place it fills with whatever memory holds, so names and shapes are
checked here on their way. Adapters are a PEFT directory that is read again. Afterwards the engine continues a probe, and its
log-probs must be the policy's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError, did_you_mean
from burnish.core.engine import Completion, Request
from burnish.inference.engine_wrappers import completion_logprobs
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import adapter_weights
from burnish.models.lora.peft_files import ADAPTER_WEIGHTS, adapter_blocks, save_adapter
from burnish.models.policy import PolicyModel, full_hf_tensors
from burnish.models.weight_files import FILE_BYTES, METADATA, block_tensors, decoder_contents, hf_tensors
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import BytesFile, TensorBytes, TensorFile, write_contents, write_file

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes that vLLM has room for adapters in."""

MAX_LOGP_GAP = {"float32": 0.02, "float16": 0.2, "bfloat16": 1.0}
"""How far a probe's log-probs may be from the learner's, by vLLM's type: other kernels, TF32 on a GPU. Other weights are further off."""

Shapes = Mapping[str, tuple[int, ...]]


@torch.no_grad()
def trained_tensors(policy: PolicyModel, adapters: bool, wide: bool = False) -> Iterator[tuple[str, Tensor]]:
    """What an update of vLLM is made of: the whole model by Hugging Face's names, or its adapters by PEFT's."""
    if not adapters:
        yield from full_hf_tensors(policy, wide)
        return
    assert isinstance(policy.module, Decoder), "only the native decoder has adapters"
    assert policy.lora is not None, "asked for the adapters of a policy without"
    yield from block_tensors(adapter_weights(policy.module), adapter_blocks(policy.module.arch, policy.lora))


class WeightUpdate:
    """The tensors of new weights: those that are handed over, or the policy's own as they are where none are.

    With `adapters` these alone; else whole weights, those with adapters added in rounded by the engine alone if that is `wide`.
    """

    def __init__(self, policy: PolicyModel, adapters: bool, wide: bool = False) -> None:
        self.policy, self.adapters, self.wide = policy, adapters, wide
        self.is_own = False
        """Whether the last one was of the policy's own tensors."""
        self._shapes: Shapes | None = None

    def tensors(self, handed: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All of them, checked on their way."""
        given = iter(handed)
        first = next(given, None)
        self.is_own = first is None
        if self._shapes is None:
            self._shapes = {name: tuple(tensor.shape) for name, tensor in self._own()}
        return check_tensors(self._own() if first is None else chain([first], given), self._shapes)

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        return trained_tensors(self.policy, self.adapters, self.wide)


def check_tensors(named_tensors: Iterable[tuple[str, Tensor]], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they come; raises for one that is unknown or does not fit, and at the end for those that are missing."""
    waiting = dict(shapes)
    for name, tensor in named_tensors:
        if name not in shapes:
            raise UserError(
                f"vLLM was sent a tensor {name!r} that the policy does not have{did_you_mean(name, shapes)}"
            )
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"vLLM was sent {name} as {tuple(tensor.shape)}, and the policy's is {shapes[name]}")
        waiting.pop(name, None)
        yield name, tensor.detach()
    if waiting:
        raise UserError(
            f"vLLM was sent new weights without {len(waiting)} of {len(shapes)} tensors, first {next(iter(waiting))}"
        )


def refresh_tied(model: nn.Module) -> None:
    """Have layers that share a weight take it again.

    On a CPU vLLM multiplies by a packed copy of it; new weights reach the copy of the layer whose name they have, and not that of an
    output head that is tied to it, which would go on with the old ones.
    """
    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and hasattr(module, "quant_method") and hasattr(module, "cpu_linear"):
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)


def verify_weights(policy: PolicyModel, asked: Request, found: Completion, dtype: str, who: str) -> None:
    """Raise unless an engine's log-probs of a probe are the policy's."""
    expected = completion_logprobs(policy.module, asked.tokens, found.tokens, asked.sampling.temperature or 1.0)
    gaps = np.abs(found.logp.astype(np.float64) - expected)
    if not (gaps <= MAX_LOGP_GAP[dtype]).all():
        worst = int(np.nan_to_num(gaps, nan=np.inf).argmax())
        raise UserError(
            f"{who} does not sample from the weights it was sent: token {worst + 1} of a probe has log-prob {found.logp[worst]:.5f} "
            f"there and {expected[worst]:.5f} at the learner; the run stops before anything is learnt from it"
        )


def write_config(policy: PolicyModel, folder: Path) -> None:
    """The config.json that a model is built from, without weights."""
    module = policy.module
    if isinstance(module, Decoder):
        ends, pad = policy.tokenizer.eos_ids, policy.tokenizer.pad_id
        contents = decoder_contents(module, keep_in_place, policy.source, ends, pad)
        write_contents(folder, takewhile(lambda content: isinstance(content, BytesFile), contents))  # they come first
    else:
        config = module.inner.config.to_dict() | {"architectures": [type(module.inner).__name__]}
        write_file(folder, "config.json", [json.dumps(config, indent=1).encode()])


def write_base(policy: PolicyModel, folder: Path) -> None:
    """A model directory of the weights below a policy's adapters, as the plain numbers that the learner multiplies by."""
    assert isinstance(policy.module, Decoder), "only the native decoder has adapters"
    write_model(folder, hf_tensors(policy.module))
    write_config(policy, folder)


def write_model(folder: Path, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """The weight files of a model directory, each as soon as its tensors are there."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    held: dict[str, TensorBytes] = {}
    total = size = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        TensorFile(name, held, METADATA).write(folder)
        weight_map.update(dict.fromkeys(held, name))

    for name, tensor in named_tensors:
        taken = keep_in_place(tensor)
        if held and size + taken.num_bytes > FILE_BYTES:
            flush()
            held, size = {}, 0
        held[name] = taken
        size, total = size + taken.num_bytes, total + taken.num_bytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(folder, "model.safetensors.index.json", [json.dumps(index, indent=1).encode()])


def write_adapter(folder: Path, policy: PolicyModel, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """A PEFT directory of the policy's kind of adapters with these weights."""
    assert isinstance(policy.module, Decoder), "only the native decoder has adapters"
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: keep_in_place(tensor) for name, tensor in named_tensors}
    save_adapter(policy.module, folder, policy.source)
    TensorFile(ADAPTER_WEIGHTS, held, METADATA).write(folder)


def max_lora_rank(rank: int) -> int:
    """The least of vLLM's sizes that holds adapters of a rank."""
    fitting = [size for size in LORA_RANKS if size >= rank]
    if not fitting:
        raise UserError(f"model.lora.rank={rank}: vLLM takes adapters up to rank {LORA_RANKS[-1]}")
    return fitting[0]
