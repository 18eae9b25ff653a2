"""A policy's weights as any other engine of the model takes them: those of its Hugging Face directory, adapters added in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from burnish.config.model import Lora
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import adapter_weights, add_lora
from burnish.models.policy import PolicyModel, save_merged, whole_tensors
from burnish.models.tokenizer import Tokenizer
from burnish.models.transformers_model import TransformersPolicy
from burnish.models.weight_loading import load_decoder, stored_tensors

TinyModel = Callable[..., tuple[Any, Path]]
CPU = torch.device("cpu")


def policy_of(module: Decoder | TransformersPolicy, source: Path | None = None) -> PolicyModel:
    return PolicyModel(module, Tokenizer.from_characters("ab"), source, "")


def check(policy: PolicyModel, folder: Path) -> None:
    stored = {name: tensor.whole() for name, tensor in stored_tensors(folder)}
    given = dict(whole_tensors(policy))
    assert given.keys() == stored.keys()
    for name, tensor in given.items():
        assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_they_are_those_of_the_directory(tiny_model: TinyModel, tied: bool) -> None:
    model, folder = tiny_model("qwen2", tied)
    check(policy_of(load_decoder(folder, torch.float32, CPU)), folder)
    check(policy_of(TransformersPolicy(model)), folder)


def test_adapters_are_added_in(tiny_model: TinyModel, tmp_path: Path) -> None:
    _, folder = tiny_model("qwen2")
    module = load_decoder(folder, torch.float32, CPU)
    add_lora(module, Lora(rank=2), seed=0)
    for parameter in adapter_weights(module).values():
        nn.init.normal_(parameter)
    policy = policy_of(module, folder)
    save_merged(policy, tmp_path)
    check(policy, tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    (plain,) = [tensor.whole() for known, tensor in stored_tensors(folder) if known == name]
    assert not torch.equal(dict(whole_tensors(policy))[name], plain)
