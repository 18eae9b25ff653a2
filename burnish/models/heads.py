"""Decoders with a scalar head: the value model of a critic, and the score model behind a reward model.

The value of a token is the value of the state before it was sampled. It is read from the hidden state one position to the
left, which has seen exactly what the policy had seen.

A score model gives one number per sequence, read at its last token that is not padding (`score_positions`). On disk it is a
transformers model for sequence classification with one label, and `AutoModelForSequenceClassification` gives the same
scores. That class also skips padding, which matters if a tokenizer pads with its end token. With adapters it is a PEFT
directory of such a model: the adapters and the whole head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import LoraBase
from burnish.core.sharded_tensors import full_tensor
from burnish.models.architecture import (
    Architecture,
    architecture_from_hf,
    architecture_to_hf,
    read_config,
    why_not_native,
)
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import adapter_weights, merged_tensors, wrap_with_lora
from burnish.models.lora.peft_files import adapter_contents, base_model_of, is_adapter, load_adapter, read_lora_config
from burnish.models.model_families import FAMILIES
from burnish.models.nf4 import quantise_layers
from burnish.models.tokenizer import Tokenizer
from burnish.models.transformers_model import TransformersBackbone, TransformersPolicy
from burnish.models.vision.processor_files import processor_contents
from burnish.models.weight_files import (
    WeightBlock,
    gathering_stage,
    hf_tensor_sizes,
    load_tensors,
    load_weight_blocks,
    materialise,
    on_meta_device,
    stored_tensors,
    weight_blocks,
    weight_contents,
)
from burnish.models.weight_layout import row_order_of
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import BytesFile, Content, writer_rank_of

SCORE_WEIGHT = "score.weight"
SCORE_STATISTICS_FILE = "scores.json"
"""Next to a score model's weights: statistics of its scores on held-out answers."""


def copy_backbone(policy: Decoder | TransformersPolicy) -> Decoder | TransformersBackbone:
    """Copy a policy without its output head; an embedding tied to the head stays.

    If the policy has adapters, only these are copied: the frozen weights are shared with the policy.
    """
    if isinstance(policy, TransformersPolicy):
        return TransformersBackbone(policy)
    return without_head(policy, policy.state_dict() if policy.lora is None else adapter_weights(policy))


def without_head(policy: Decoder, copied: Collection[str] = ()) -> Decoder:
    """A decoder without output head that shares the tensors of another, except for copies of those named in `copied`."""
    with on_meta_device():
        copy = Decoder(replace(policy.arch, tied=True))
        if policy.lora is not None:
            wrap_with_lora(copy, policy.lora)
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith("head.")}
    copy.load_state_dict({name: t.clone() if name in copied else t for name, t in state.items()}, assign=True)
    copy.unloaded_from = policy.unloaded_from
    if policy.vision is not None and copy.vision is not None:  # assigned tensors are trained unless it is said
        for own, theirs in zip(copy.vision.parameters(), policy.vision.parameters(), strict=True):
            own.requires_grad_(theirs.requires_grad)
    return copy


class ValueModel(nn.Module):
    """A policy's backbone and a scalar head. The head starts at 0, so that the first advantages are plain returns."""

    def __init__(self, policy: Decoder | TransformersPolicy) -> None:
        super().__init__()
        self.backbone = copy_backbone(policy)
        out = policy.head_weight if isinstance(policy, Decoder) else policy.inner.get_output_embeddings().weight
        # In bfloat16 values near 1 would be 2^-8 apart, too coarse for differences of targets.
        wide = torch.promote_types(out.dtype, torch.float32)
        self.head = nn.Parameter(torch.zeros(1, out.shape[1], dtype=wide, device=out.device))

    @property
    def attention_cost(self) -> float | None:
        """The backbone's relative cost of attention; None if it is unknown."""
        return getattr(self.backbone, "attention_cost", None)

    def token_values(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, shared_prefix: Tensor | None = None
    ) -> Tensor:
        """Values [M] of the states before the `wanted` tokens (never the first of a sequence)."""
        hidden, shard = self.backbone.states(tokens, offsets, wanted - 1, shared_prefix)
        return shard.gather_wanted(_scalar_outputs(hidden, self.head))


class ScoreModel(nn.Module):
    """A decoder backbone and a scalar head without bias, which scores a text."""

    def __init__(self, backbone: Decoder, head: Tensor) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Parameter(head)

    @property
    def arch(self) -> Architecture:
        return self.backbone.arch

    @property
    def attention_cost(self) -> float | None:
        """The backbone's relative cost of attention; None if it is unknown."""
        return getattr(self.backbone, "attention_cost", None)

    def token_values(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, shared_prefix: Tensor | None = None
    ) -> Tensor:
        """Scores [M] of the text up to and including each `wanted` token."""
        hidden, shard = self.backbone.states(tokens, offsets, wanted, shared_prefix)
        return shard.gather_wanted(_scalar_outputs(hidden, self.head))

    def contents(
        self, stage: TensorStaging, source: Path | None, tokenizer: Tokenizer, merged: bool = False
    ) -> list[Content]:
        """Files of a Hugging Face directory for sequence classification; of a sharded model, those of this process.

        The layers came from `source`. With adapters it is a PEFT directory, unless they are to be `merged`.
        """
        if self.backbone.lora is not None and not merged:
            return [*adapter_contents(self.backbone, stage, source, self.head), *tokenizer.contents()]
        part = writer_rank_of(self)
        sizes = [*hf_tensor_sizes(self.backbone), (SCORE_WEIGHT, self.head.numel() * self.head.element_size())]
        files: list[Content] = []
        if part.index == 0:
            files += [
                BytesFile("config.json", json.dumps(self._config(source, tokenizer), indent=1)),
                *tokenizer.contents(),
                *processor_contents(self.arch.vision, source),
            ]
        tensors = chain(merged_tensors(self.backbone), [(SCORE_WEIGHT, full_tensor(self.head))])
        return [*files, *weight_contents(tensors, sizes, gathering_stage(stage, part), part)]

    def load_weights(self, directory: Path) -> None:
        """Copy the weights of a saved directory in place (with adapters: adapters and head); tensors keep their addresses."""
        if self.backbone.lora is not None:
            load_adapter(self.backbone, directory, self.head)
            return
        tensors = ((n, t) for n, t in stored_tensors(directory) if not n.endswith("rotary_emb.inv_freq"))
        with torch.no_grad():
            load_weight_blocks(
                dict(self.named_parameters()),
                _score_model_blocks(self.arch),
                tensors,
                str(directory),
                "config.json implies",
                partial(row_order_of, self.backbone),
            )

    def _config(self, source: Path | None, tokenizer: Tokenizer) -> dict[str, Any]:
        """The source's config.json for the sequence classification class."""
        dtype = str(self.backbone.embedding.weight.dtype).removeprefix("torch.")
        config = (
            architecture_to_hf(self.arch, dtype, tokenizer.eos_ids, tokenizer.pad_id)
            if source is None
            else read_config(source)
        )
        config.pop("torch_dtype", None)
        name = f"{FAMILIES[self.arch.family].hf_class.rpartition('For')[0]}ForSequenceClassification"
        labels = {"num_labels": 1, "id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}, "problem_type": "regression"}
        return {**config, "architectures": [name], "dtype": dtype, "pad_token_id": tokenizer.pad_id, **labels}


def score_positions(tokens: Tensor, offsets: Tensor, pad_id: int) -> Tensor:
    """Position [S] at which each packed sequence is scored: its last token that is not `pad_id`, or its first if all are."""
    places = torch.arange(tokens.numel(), device=tokens.device)
    candidates = torch.where(tokens == pad_id, torch.zeros_like(places), places)
    ids = torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=tokens.device), offsets.diff())
    last = offsets[:-1].clone()
    return last.scatter_reduce_(0, ids, candidates, "amax")


def new_score_model(policy: nn.Module, seed: int) -> ScoreModel:
    """A score model that takes over a policy's tensors and adapters. Its head is random, so initial scores are near 0."""
    if not isinstance(policy, Decoder):
        raise UserError("a reward model needs the native decoder, and this model runs through transformers")
    backbone = without_head(policy)
    weight = backbone.embedding.weight
    # In bfloat16 scores near 1 would be 2^-8 apart, more than many pairs differ by.
    wide, width = torch.promote_types(weight.dtype, torch.float32), policy.arch.hidden_size
    noise = torch.randn(1, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ScoreModel(backbone, (noise / math.sqrt(width + 1)).to(weight.device, wide))


def load_score_model(directory: Path, dtype: torch.dtype, device: torch.device) -> ScoreModel:
    """Load a score model from a Hugging Face directory for sequence classification with one label, or its PEFT directory."""
    if is_adapter(directory):
        return _load_adapted_score_model(directory, dtype, device)
    config = read_config(directory)
    names = config.get("architectures") or ["?"]
    if not str(names[0]).endswith("ForSequenceClassification"):
        raise UserError(
            f"{directory} is a {names[0]}, not a reward model: a reward model is a ...ForSequenceClassification with one "
            "label, such as a checkpoint of `burnish reward-model`"
        )
    labels = config.get("num_labels") or len(config.get("id2label") or {}) or 2
    if labels != 1:
        raise UserError(
            f"{directory} gives {labels} numbers per text, and a reward is one number: its config needs num_labels 1"
        )
    model = _with_zero_head(_empty_backbone(directory, config, dtype, device))
    model.load_weights(directory)
    return model


def _load_adapted_score_model(directory: Path, dtype: torch.dtype, device: torch.device) -> ScoreModel:
    """Load the adapters and head of a PEFT directory on its base: a language model, or a score model whose head is dropped."""
    lora, base = read_lora_config(directory, scores=True), base_model_of(directory)
    backbone = _empty_backbone(base, read_config(base), dtype, device, lora.base)
    load_tensors(backbone, ((name, tensor) for name, tensor in stored_tensors(base) if name != SCORE_WEIGHT), str(base))
    wrap_with_lora(backbone, lora)
    model = _with_zero_head(backbone)
    model.load_weights(directory)
    return model


def _empty_backbone(
    directory: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device, base: LoraBase = "dtype"
) -> Decoder:
    """An uninitialised decoder of a directory's architecture, without output head."""
    reason = why_not_native(config)
    if reason is not None:
        raise UserError(f"a reward model needs the native decoder, and {directory} cannot run on it: {reason}")
    with on_meta_device():
        backbone = Decoder(replace(architecture_from_hf(config, str(directory / "config.json")), tied=True))
        quantise_layers(backbone, base)
    materialise(backbone, dtype, device)
    return backbone


def _with_zero_head(backbone: Decoder) -> ScoreModel:
    weight = backbone.embedding.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    return ScoreModel(backbone, torch.zeros(1, backbone.arch.hidden_size, dtype=wide, device=weight.device))


def _score_model_blocks(arch: Architecture) -> list[WeightBlock]:
    """Our parameters under transformers' names: the backbone's, and the head."""
    backbone = [replace(block, parameter_name=f"backbone.{block.parameter_name}") for block in weight_blocks(arch)]
    return [*backbone, WeightBlock(SCORE_WEIGHT, "head")]


def _scalar_outputs(hidden: Tensor, head: Tensor) -> Tensor:
    """The scalar head on hidden states [m, hidden]; [m]."""
    # The sum over one entry makes a new tensor: FSDP attaches its hook to the output, and a view would lose it.
    return (hidden.to(head.dtype) @ head.t()).sum(1)
