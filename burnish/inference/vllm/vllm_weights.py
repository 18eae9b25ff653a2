"""Weights for vLLM: whole models and adapters from named tensors, and the check that they arrived.

A whole model goes through vLLM's `reload_weights`, which knows which tensors vLLM joins, packs or pads. It does not report a
missing tensor and leaves its memory undefined, so names and shapes are checked here. Adapters are sent as a PEFT directory.
Afterwards the engine continues a probe, and its log-probs must match the policy's.
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
from burnish.inference.server_client import write_weight_files
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import adapter_weights, trained_tower_weights
from burnish.models.lora.peft_files import ADAPTER_WEIGHTS, adapter_blocks, save_adapter
from burnish.models.policy import PolicyModel, full_hf_tensors
from burnish.models.weight_files import METADATA, block_tensors, decoder_contents, hf_tensors
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import BytesFile, write_contents, write_file
from burnish.run.checkpoint.tensor_file import TensorFile

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can be started for."""

MAX_LOGP_GAP = {"float32": 0.02, "float16": 0.2, "bfloat16": 1.0}
"""Largest difference of a probe's log-probs from the learner's, by vLLM's type. Other kernels and TF32 stay below it; other weights do not."""

Shapes = Mapping[str, tuple[int, ...]]


@torch.no_grad()
def trained_tensors(policy: PolicyModel, adapters: bool, wide: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an update: the whole model under Hugging Face's names, or the adapters under PEFT's."""
    if not adapters:
        yield from full_hf_tensors(policy, wide)
        return
    assert isinstance(policy.module, Decoder), "only the native decoder has adapters"
    assert policy.lora is not None, "the policy has no adapters"
    if trained_tower_weights(policy.module):
        raise UserError(
            "vLLM takes adapters only, and the vision tower is trained too: set model.vision=frozen, or engine=native"
        )
    yield from block_tensors(adapter_weights(policy.module), adapter_blocks(policy.module.arch, policy.lora))


class WeightUpdate:
    """The tensors of new weights: those given to `load`, or the policy's own if none are.

    With `adapters` only the adapters are sent, else whole weights. `wide` sends weights with merged adapters unrounded, for an
    engine in float32.
    """

    def __init__(self, policy: PolicyModel, adapters: bool, wide: bool = False) -> None:
        self.policy, self.adapters, self.wide = policy, adapters, wide
        self.is_own = False
        """Whether the last update had the policy's own tensors."""
        self._shapes: Shapes | None = None

    def tensors(self, handed: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an update, checked."""
        given = iter(handed)
        first = next(given, None)
        self.is_own = first is None
        if self._shapes is None:
            self._shapes = {name: tuple(tensor.shape) for name, tensor in self._own()}
        return check_tensors(self._own() if first is None else chain([first], given), self._shapes)

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        return trained_tensors(self.policy, self.adapters, self.wide)


def check_tensors(named_tensors: Iterable[tuple[str, Tensor]], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; raise for an unknown name or a wrong shape, and at the end for missing ones."""
    missing = dict(shapes)
    for name, tensor in named_tensors:
        if name not in shapes:
            raise UserError(
                f"vLLM was sent a tensor {name!r} that the policy does not have{did_you_mean(name, shapes)}"
            )
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"vLLM was sent {name} as {tuple(tensor.shape)}, and the policy's is {shapes[name]}")
        missing.pop(name, None)
        yield name, tensor.detach()
    if missing:
        raise UserError(
            f"vLLM was sent new weights without {len(missing)} of {len(shapes)} tensors, first {next(iter(missing))}"
        )


def refresh_tied(model: nn.Module) -> None:
    """Update the packed copies of layers that share a weight.

    On a CPU vLLM multiplies by a packed copy of a weight. New weights reach only the copy of the layer that they name; an output
    head tied to it would keep the old ones.
    """
    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and hasattr(module, "quant_method") and hasattr(module, "cpu_linear"):
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)


def verify_weights(policy: PolicyModel, probe: Request, found: Completion, dtype: str, who: str) -> None:
    """Raise unless an engine's log-probs of a probe match the policy's."""
    expected = completion_logprobs(policy.module, probe.tokens, found.tokens, probe.sampling.temperature or 1.0)
    gaps = np.abs(found.logp.astype(np.float64) - expected)
    if not (gaps <= MAX_LOGP_GAP[dtype]).all():
        worst = int(np.nan_to_num(gaps, nan=np.inf).argmax())
        raise UserError(
            f"{who} does not sample from the weights it was sent: token {worst + 1} of a probe has log-prob {found.logp[worst]:.5f} "
            f"there and {expected[worst]:.5f} at the learner; the run stops before anything is learnt from it"
        )


def write_config(policy: PolicyModel, folder: Path) -> None:
    """Write the config.json of the policy's model, without weights."""
    module = policy.module
    if isinstance(module, Decoder):
        ends, pad = policy.tokenizer.eos_ids, policy.tokenizer.pad_id
        contents = decoder_contents(module, keep_in_place, policy.source, ends, pad)
        write_contents(
            folder, takewhile(lambda content: isinstance(content, BytesFile), contents)
        )  # these come before the weights
    else:
        config = module.inner.config.to_dict() | {"architectures": [type(module.inner).__name__]}
        write_file(folder, "config.json", [json.dumps(config, indent=1).encode()])


def write_base(policy: PolicyModel, folder: Path) -> None:
    """Write a model directory of a policy's base weights, dequantised as the learner uses them."""
    assert isinstance(policy.module, Decoder), "only the native decoder has adapters"
    write_weight_files(folder, hf_tensors(policy.module))
    write_config(policy, folder)


def write_adapter(folder: Path, policy: PolicyModel, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a PEFT directory of the policy's adapter settings with these weights."""
    assert isinstance(policy.module, Decoder), "only the native decoder has adapters"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: keep_in_place(tensor) for name, tensor in named_tensors}
    save_adapter(policy.module, folder, policy.source)
    TensorFile(ADAPTER_WEIGHTS, tensors, METADATA).write(folder)


def max_lora_rank(rank: int) -> int:
    """The smallest rank of vLLM that fits adapters of `rank`."""
    fitting = [size for size in LORA_RANKS if size >= rank]
    if not fitting:
        raise UserError(f"model.lora.rank={rank}: vLLM takes adapters up to rank {LORA_RANKS[-1]}")
    return fitting[0]
